// A field above each long table: rows that do not have all its words are hidden.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const rows = [...table.querySelectorAll("tbody tr")];
  if (rows.length < 16) continue;
  const label = document.createElement("label");
  const field = document.createElement("input");
  const count = document.createElement("output");
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  label.className = "ucp-filter";
  field.type = "search";
  field.addEventListener("input", show);
  label.append("Filter", field, count);
  table.before(label);
  show();
}

// The theme makes a landmark of each code block's button; so many of one name tell nobody anything.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
}).observe(document.body, { childList: true, subtree: true });

// Names that the theme does not give.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
document.querySelector("nav.md-path")?.setAttribute("aria-label", "Where this page is");
