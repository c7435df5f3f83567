"use strict";
(() => {
  const missing = (cell) => cell.classList.contains("missing");
  const headsOf = (table) => [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const compare = (a, b) => a.dataset.v !== undefined && b.dataset.v !== undefined
    ? Number(a.dataset.v) - Number(b.dataset.v)
    : a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  const sortBy = (table, i) => {
    const heads = headsOf(table);
    const up = heads[i].getAttribute("aria-sort") !== "ascending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].sort((x, y) => {
      const a = x.cells[i], b = y.cells[i];
      if (missing(a) || missing(b)) return missing(a) - missing(b); // what is not known stays last either way
      return up ? compare(a, b) : compare(b, a);
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    headsOf(table).forEach((h, i) => h.querySelector("button").addEventListener("click", () => sortBy(table, i)));
  }

  const quote = (s) => /[",\r\n]/.test(s) ? `"${s.replaceAll('"', '""')}"` : s;
  const line = (words) => words.map(quote).join(",");
  const csv = (table) => [line(headsOf(table).map((h) => h.dataset.name)), ...[...table.tBodies[0].rows].map((r) =>
    line([...r.cells].map((c) => missing(c) ? "" : c.dataset.v ?? c.textContent)))].join("\n") + "\n";
  const fallback = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const text = csv(document.getElementById(button.dataset.table));
      let done = true;
      try { await navigator.clipboard.writeText(text); } catch { done = fallback(text); }
      button.nextElementSibling.textContent = done ? "copied" : "copying is not allowed here";
    });
  }
})();
