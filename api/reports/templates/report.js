"use strict";
// The page is whole without this: it filters the failures, and opens the one that a link leads to.
const filter = document.getElementById("filter");
if (filter) {
  const failures = [...document.querySelectorAll("#failures details")];
  const groups = document.querySelectorAll("#failures .group");
  const chips = [...filter.querySelectorAll("button")];
  const search = filter.querySelector("input");
  const told = filter.querySelector("output");
  const texts = new Map();
  const text = (failure) => {
    if (!texts.has(failure)) texts.set(failure, failure.textContent.toLowerCase());
    return texts.get(failure);
  };
  const apply = () => {
    const verdicts = new Set(chips.filter((chip) => chip.ariaPressed === "true").map((chip) => chip.value));
    const wanted = search.value.trim().toLowerCase();
    let shown = 0;
    for (const failure of failures) {
      const fits = !verdicts.size || verdicts.has(failure.dataset.verdict);
      failure.hidden = !(fits && (!wanted || text(failure).includes(wanted)));
      shown += !failure.hidden;
    }
    for (const group of groups) group.hidden = !group.querySelector("details:not([hidden])");
    told.value = `${shown} of ${failures.length} shown`;
  };
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.ariaPressed = chip.ariaPressed === "true" ? "false" : "true";
      apply();
    });
  }
  search.addEventListener("input", apply);
  filter.hidden = false;
  apply();
}
const follow = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.tagName !== "DETAILS") return;
  target.hidden = false;
  if (target.parentElement.matches(".group")) target.parentElement.hidden = false;
  target.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", follow);
follow();
