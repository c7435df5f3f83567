"use strict";
(() => {
  const table = document.getElementById("results");
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => { const c = row.cells[i]; return c.dataset.v === undefined ? c.textContent : Number(c.dataset.v); };
  const sortBy = (i) => {
    const up = heads[i].getAttribute("aria-sort") !== "ascending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = value(a, i), y = value(b, i);
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows);
  };
  heads.forEach((h, i) => {
    h.addEventListener("click", () => sortBy(i));
    h.addEventListener("keydown", (e) => { if (e.key === "Enter") sortBy(i); });
  });
  const quote = (s) => /[",\n]/.test(s) ? `"${s.replaceAll('"', '""')}"` : s;
  const csv = () => [...table.rows].map((r) => [...r.cells].map((c) => quote(c.dataset.v ?? c.textContent)).join(",")).join("\n");
  document.getElementById("copy").addEventListener("click", async () => {
    const status = document.getElementById("copied");
    try { await navigator.clipboard.writeText(csv()); status.textContent = "copied"; }
    catch { const area = document.createElement("textarea"); area.value = csv(); document.body.append(area); area.select();
      status.textContent = document.execCommand("copy") ? "copied" : "copying is not allowed here"; area.remove(); }
  });
})();
