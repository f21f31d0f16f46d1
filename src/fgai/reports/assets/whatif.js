// The part "What if?" of a report.
const whatif = JSON.parse(document.getElementById("data").textContent).whatif;
const whatifPlace = document.getElementById("whatif-page");
if (whatif) await mount(whatifPlace, whatif);
else document.querySelector("#whatif p").textContent = "Not on this page; fgai explore shows it.";
whatifPlace.dataset.ready = "true";
