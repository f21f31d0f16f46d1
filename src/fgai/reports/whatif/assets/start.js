// The page of `fgai explore`: the theme of the system, and Python behind the page.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const follow = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
follow();
dark.addEventListener("change", follow);
const ask = async (question, change) => {
  const answer = await fetch(question, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(change) });
  const values = await answer.json();
  if (!answer.ok) throw new Error(values.error);
  return values;
};
const facts = await (await fetch("facts.json")).json();
await mount(document.getElementById("whatif"), facts, ask);
document.documentElement.dataset.ready = "true";
