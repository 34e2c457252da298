// Recoveries, newest first: the cost of each, by part. Pure.

import { RECOVERY_PARTS, isWorker, partsOf } from "./picture.js";
import { h } from "./tree.js";
import { ago, clock, counted, oneLine, seconds } from "./words.js";

const SHOWN = 10;
const KINDS = {
  failure: "Failure",
  error: "Failure",
  "node-failure": "Node lost",
  resize: "Resize",
  leave: "Nodes left",
  unknown: "World changed",
};

export function recoveries(picture, state) {
  const all = picture.view.recoveries.toReversed();
  const shown = all.slice(0, SHOWN + (state.more.get("recoveries") ?? 0));
  const aside = h("span", { class: "aside" }, summary(picture.view.recovery_totals));
  return h(
    "section",
    { key: "recoveries", id: "recoveries", "aria-labelledby": "recoveries-title" },
    h("h2", { id: "recoveries-title" }, "Recoveries", aside),
    all.length === 0
      ? h("p", { class: "quiet" }, "No failures and no joining or leaving nodes so far.")
      : [legend(), table(shown, picture), more(all.length - shown.length)],
  );
}

/** Of all recoveries; the view has only the last ones. */
function summary({ changes, failures, failures_cost: cost }) {
  if (!failures) return changes ? counted(changes, "change") : "";
  return `${counted(failures, "failure")} cost ${seconds(cost)}`;
}

function legend() {
  const item = ([part, text]) => {
    const swatch = h("span", { class: `swatch ${part}`, "aria-hidden": "true" });
    return h("li", { title: text }, swatch, part);
  };
  const all = Object.entries(RECOVERY_PARTS).map(item);
  return h("ul", { class: "legend inline", "aria-label": "Parts of a recovery" }, all);
}

function more(left) {
  if (left <= 0) return null;
  const text = `Show more recoveries: ${left} left`;
  return h("button", { type: "button", "data-more": "recoveries" }, text);
}

// On a narrow screen rows are laid out as blocks; the roles keep them a table for screen readers.

function table(shown, picture) {
  const longest = Math.max(...shown.map((one) => one.cost), 1e-9);
  const heads = ["when", "what happened", "cost", ...Object.keys(RECOVERY_PARTS)];
  const head = (name, place) => {
    const kind = place > 1 ? "number" : null;
    return h("th", { role: "columnheader", scope: "col", class: kind }, name);
  };
  return h(
    "table",
    { class: "records recoveries", role: "table" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map(head))),
    h("tbody", { role: "rowgroup" }, shown.map((one) => row(one, longest, picture))),
  );
}

/** The failure, if the next world says no more than that it could be formed. */
export function why(one) {
  const cause = one.failure;
  if (!cause || !isWorker(cause) || one.why.startsWith(`rank ${cause.rank} `)) return one.why;
  return `rank ${cause.rank} on ${cause.node}: ${cause.message}; ${one.why}`;
}

function row(one, longest, { view, now }) {
  const over = view.ended !== null;
  const cost = one.done ? seconds(one.cost) : over ? "the job ended" : "in progress";
  return h(
    "tr",
    { key: `${one.generation}`, role: "row" },
    h(
      "td",
      { role: "cell", class: "when" },
      h("span", null, clock(one.wall, now)),
      h("small", null, ago(one.wall, now)),
    ),
    h(
      "td",
      { role: "cell", class: "what" },
      h("span", { class: `mark ${one.is_failure ? "bad" : "calm"}`, "aria-hidden": "true" }),
      h("b", { class: "user" }, KINDS[one.kind] ?? oneLine(one.kind, 40)),
      ` in generation ${one.generation}`,
      h("span", { class: "user why" }, oneLine(why(one), 300)),
      bar(one, longest),
    ),
    h("td", { role: "cell", class: "number cost", "data-label": "cost" }, cost),
    Object.keys(RECOVERY_PARTS).map((part) => cell(one, part, over)),
  );
}

function cell(one, part, over) {
  const value = one[part];
  const nothing = Number.isFinite(value) && value < 0.0005;
  const known = nothing ? "0" : seconds(value);
  const text = Number.isFinite(value) ? known : one.done || over ? "–" : "…";
  const kind = nothing ? "number nothing" : "number";
  return h("td", { role: "cell", class: kind, "data-label": part }, text);
}

/** The parts as a bar; the longest recovery fills the width. */
function bar(one, longest) {
  let x = 0;
  const drawn = partsOf(one).map(([part, value]) => {
    const share = (value / longest) * 100;
    const place = { x: `${x.toFixed(3)}%`, width: `${share.toFixed(3)}%`, height: "100%" };
    x += share;
    return h(
      "rect",
      { key: part, class: part, ...place },
      h("title", null, `${part} ${seconds(value)}`),
    );
  });
  return h("svg", { class: "bar", "aria-hidden": "true", width: "100%", height: "8" }, drawn);
}
