// Steps with bad numbers, newest first: what was bad, on which rank, and its samples. Pure.

import { h } from "./tree.js";
import { ago, clock, count, counted, oneLine } from "./words.js";

/** Rows, and samples of a rank, that are shown. */
const SHOWN = 10;
const SAMPLES = 16;
const DONE = {
  skip: "skipped",
  retry: "repeated",
  rewind: "undone: training went back behind it",
  stop: "bad: training stopped",
};

const NOT_FINITE = ["nan", "inf", "-inf"];

/** Nothing if no step was bad. */
export function badSteps({ view, now }) {
  const all = view.bad_steps.toReversed();
  if (!all.length) return null;
  const aside = h("span", { class: "aside" }, counted(view.bad_steps_total, "step"));
  const heads = ["when", "what happened", "loss", "norm"];
  const head = (name, place) =>
    h("th", { role: "columnheader", scope: "col", class: place > 1 ? "number" : null }, name);
  return h(
    "section",
    { key: "bad-steps", id: "bad-steps", "aria-labelledby": "bad-steps-title" },
    h("h2", { id: "bad-steps-title" }, "Bad steps", aside),
    h(
      "table",
      { class: "records bad-steps", role: "table" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map(head))),
      h(
        "tbody",
        { role: "rowgroup" },
        all.slice(0, SHOWN).map((one) => row(one, now)),
      ),
    ),
  );
}

function row(one, now) {
  const undone = one.undone ? "; undone since" : "";
  return h(
    "tr",
    { key: `${one.generation} ${one.step} ${one.action}`, role: "row" },
    h(
      "td",
      { role: "cell", class: "when" },
      h("span", null, clock(one.wall, now)),
      h("small", null, ago(one.wall, now)),
    ),
    h(
      "td",
      { role: "cell", class: "what" },
      h("span", { class: "mark bad", "aria-hidden": "true" }),
      h("b", { class: "user" }, `Step ${count(one.step)} ${DONE[one.action] ?? ""}`),
      h("span", { class: "user" }, `: ${reason(one)}${undone}`),
      h("span", { class: "user why" }, origin(one)),
    ),
    h("td", { role: "cell", class: "number", "data-label": "loss" }, value(one.loss)),
    h("td", { role: "cell", class: "number", "data-label": "norm" }, value(one.norm)),
  );
}

function reason(one) {
  const above = one.deviation ? ` (${one.deviation.toFixed(1)} deviations above the median)` : "";
  return `${oneLine(one.reason, 160)}${above}`;
}

/** The ranks whose own numbers were bad, with their samples. */
function origin(one) {
  if (!one.origins.length) return `all ranks together, ${counted(one.samples, "sample")}`;
  const more = one.ranks - one.origins.length;
  const ranks = one.origins.map(ofRank).join("; ");
  return more > 0 ? `${ranks}; and ${counted(more, "more rank")}` : ranks;
}

function ofRank(one) {
  const ids = one.ids.slice(0, SAMPLES).map((id) => (Array.isArray(id) ? id.join(":") : id));
  const rest = one.samples - ids.length;
  const samples = ids.length
    ? `, samples ${ids.join(", ")}${rest > 0 ? ` and ${count(rest)} more` : ""}`
    : "";
  const parts = one.micro_batches.length ? `, micro-batch ${one.micro_batches.join(", ")}` : "";
  return `rank ${one.rank}${parts}${samples}`;
}

/** A number, or the text of one that is not finite. */
function value(given) {
  if (typeof given === "number") return String(Number(given.toPrecision(6)));
  return NOT_FINITE.includes(given) ? given : "–";
}
