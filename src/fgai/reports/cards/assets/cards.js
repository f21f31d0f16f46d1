"use strict";
const root = document.documentElement, toggle = document.getElementById("theme");
function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  toggle.textContent = dark ? "Light" : "Dark";
}
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
toggle.addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));

function keyOf(row, place) {
  const cell = row.cells[place];
  return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
}

function compare(one, two, place, numeric, sign) {
  if (!numeric) return sign * one.cells[place].textContent.localeCompare(two.cells[place].textContent);
  const a = keyOf(one, place), b = keyOf(two, place);
  if (a === null || b === null) return (a === null) - (b === null);  // what is not known stands last
  return sign * (a - b);
}

for (const button of document.querySelectorAll(".board thead button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, place = head.cellIndex, table = head.closest("table");
    const numeric = place > 1, body = table.tBodies[0];
    const first = numeric && button.dataset.best !== "lower" ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    for (const cell of table.tHead.rows[0].cells) cell.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...body.rows].sort((one, two) => compare(one, two, place, numeric, sign));
    body.append(...rows);
  });
}

function openNamed() {
  const named = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named instanceof HTMLDetailsElement) named.open = true;
}
addEventListener("hashchange", openNamed);
openNamed();
root.dataset.ready = "true";
