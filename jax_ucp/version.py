"""The version of this package, which processes that work together compare."""

VERSION = "0.3.0"
