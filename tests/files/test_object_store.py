"""Where buckets are, and as whom they are asked: what the clouds' own tools are told."""

import pickle
import sys

import pytest

from jax_ucp.arguments import require_extra
from jax_ucp.errors import StoreError, UnsupportedPath
from jax_ucp.files.object_store import open_store
from jax_ucp.files.path import file_path


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_profile_is_read(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id=K\naws_secret_access_key=S\n")
    (tmp_path / "config").write_text("[profile lab]\nregion=eu-west-3\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store("s3", "bucket")
    assert store.credential_provider()["access_key_id"] == "K"
    assert store.config["region"] == "eu-west-3"
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StoreError, match="pip install boto3"):
        open_store("s3", "bucket")


def test_who_has_no_credentials_asks_without(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert open_store("s3", "bucket").config["skip_signature"]


def test_keys_of_the_environment_come_first(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
    assert open_store("s3", "bucket").credential_provider is None


def test_an_account_of_azure_is_in_a_connection_string_or_in_the_url(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=lab;AccountKey=a2V5")
    assert open_store("az", "box").config["account_name"] == "lab"
    assert open_store("abfs", "box@home.dfs.core.windows.net").config["account_name"] == "home"


def test_a_container_of_no_account_is_refused_with_where_to_look():
    with pytest.raises(StoreError, match=r"az://box: .*[Aa]ccount.*where-checkpoints-live\.md$"):
        open_store("az", "box")


def test_an_emulator_of_google_is_asked_where_it_is(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    assert "http://127.0.0.1:9" in str(open_store("gs", "bucket").config)


@pytest.mark.parametrize(("text", "url"), [
    ("s3://bucket/a b/c#d%20e", "s3://bucket/a b/c#d%20e"),
    ("s3:/bucket/a/", "s3://bucket/a"),  # as pathlib makes it
    ("S3A://bucket", "s3://bucket"),
    ("gcs://bucket/a", "gs://bucket/a"),
    ("abfss://box@home.dfs.core.windows.net/a", "abfs://box@home.dfs.core.windows.net/a"),
    ("https://host:8/a%20b/c", "https://host:8/a%20b/c"),
])  # fmt: skip
def test_a_url_names_the_same_when_it_is_read_back(text, url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "K")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")
    path = file_path(text)
    assert str(path) == url
    assert str(file_path(str(path))) == url
    assert str(pickle.loads(pickle.dumps(path))) == url


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://bucket/../x", "gs://bucket/a//b"])
def test_what_names_no_file_of_a_bucket_is_refused(url):
    with pytest.raises(UnsupportedPath, match="names no"):
        file_path(url)


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UnsupportedPath, match=r'pip install "jax_ucp\[cloud\]"'):
        require_extra("obstore", "cloud", "s3://bucket")
