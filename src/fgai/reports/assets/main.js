// Start: theme first, then every part; a part that fails says so and the others go on.
const root = document.documentElement;
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = null;
try { theme = window.localStorage.getItem("fgai-theme"); } catch { /* not every browser keeps anything for files */ }

function applyTheme(printing) {
  const dark = !printing && (theme ? theme === "dark" : prefersDark.matches);
  root.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
}

applyTheme(false);
byId("theme").addEventListener("click", () => {
  theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { window.localStorage.setItem("fgai-theme", theme); } catch { /* as above */ }
  applyTheme(false);
  redrawAll();
});
prefersDark.addEventListener("change", () => { applyTheme(false); redrawAll(); });
function print(begins) {
  root.classList.toggle("printing", begins);
  applyTheme(begins);
  redrawAll();
}
window.addEventListener("beforeprint", () => print(true));
window.addEventListener("afterprint", () => print(false));
let width = window.innerWidth;
let timer = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  window.clearTimeout(timer);
  timer = window.setTimeout(redrawAll, 120);
});

if (explorer && dig(explorer, "nodes.id.length")) {
  readExplorer();
  chosen = explorer.nodes.id[0];
}
part("network", drawNetwork);
part("node", () => {
  if (!explorer || !dig(explorer, "nodes.id.length")) return false;
  startPicker();
  return true;
});
part("distribution-plots", drawDistribution);
part("curve-plots", drawCurves);
part("certified-plots", drawCertified);
part("loss-plots", drawLosses);

byId("download").addEventListener("click", () => {
  const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(doc)], { type: "application/json" })), download: "report.json" });
  link.click();
  URL.revokeObjectURL(link.href);
});
root.dataset.ready = "true";
