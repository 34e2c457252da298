// Recoveries, the newest first: what each cost, and where that went. Pure.

import { h } from "./tree.js";
import { RECOVERY_PARTS, partsOf } from "./picture.js";
import { ago, clock, counted, oneLine, seconds } from "./words.js";

const SHOWN = 10;

export function recoveries(picture, state) {
  const all = picture.view.recoveries.toReversed();
  const shown = all.slice(0, SHOWN + (state.more.get("recoveries") ?? 0));
  return h(
    "section",
    { key: "recoveries", id: "recoveries", "aria-labelledby": "recoveries-title" },
    h("h2", { id: "recoveries-title" }, "Recoveries", h("span", { class: "aside" }, summary(all))),
    all.length === 0
      ? h("p", { class: "quiet" }, "The world has not changed so far: nothing was lost.")
      : [legend(), table(shown, picture), more(all.length - shown.length)],
  );
}

function summary(all) {
  const failures = all.filter((one) => one.is_failure);
  const cost = failures.reduce((sum, one) => sum + one.cost, 0);
  if (!failures.length) return all.length ? counted(all.length, "change") : "";
  return `${counted(failures.length, "failure")} cost ${seconds(cost)}`;
}

function legend() {
  const parts = Object.entries(RECOVERY_PARTS);
  return h(
    "ul",
    { class: "legend inline", "aria-label": "Parts of a recovery" },
    parts.map(([part, text]) => h("li", { title: text }, swatch(part), part)),
  );
}

function swatch(part) {
  return h("span", { class: `swatch ${part}`, "aria-hidden": "true" });
}

function table(shown, picture) {
  const longest = Math.max(...shown.map((one) => one.cost), 1e-9);
  const heads = ["when", "what happened", "cost", ...Object.keys(RECOVERY_PARTS)];
  return h(
    "table",
    { class: "recoveries", role: "table" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((head, place) =>
      h("th", { role: "columnheader", scope: "col", class: place > 1 ? "number" : null }, head)))),
    h("tbody", { role: "rowgroup" }, shown.map((one) => row(one, longest, picture))),
  );
}

function row(one, longest, { view, now }) {
  const over = view.ended !== null;
  return h(
    "tr",
    { key: `${one.generation}`, role: "row" },
    h("td", { role: "cell", class: "when" }, h("span", null, clock(one.wall, now)), h("small", null, ago(one.wall, now))),
    h(
      "td",
      { role: "cell", class: "what" },
      h("span", { class: `mark ${one.is_failure ? "bad" : "calm"}`, "aria-hidden": "true" }),
      h("b", { class: "user" }, KINDS[one.kind] ?? oneLine(one.kind, 40)),
      ` in generation ${one.generation}`,
      h("span", { class: "user why" }, oneLine(one.why, 300)),
      bar(one, longest),
    ),
    h("td", { role: "cell", class: "number cost", "data-label": "cost" }, one.done ? seconds(one.cost) : over ? "the job ended" : "not over yet"),
    Object.keys(RECOVERY_PARTS).map((part) => cell(one, part, over)),
  );
}

const KINDS = {
  failure: "A worker failed",
  error: "A worker failed",
  "node-failure": "A node was lost",
  resize: "The world was resized",
  leave: "Nodes left",
  unknown: "The world changed",
};

function cell(one, part, over) {
  const known = one[part] !== null && one[part] !== undefined;
  const nothing = known && one[part] < 0.0005;
  const text = !known ? (one.done || over ? "–" : "…") : nothing ? "0" : seconds(one[part]);
  return h("td", { role: "cell", class: `number ${nothing ? "nothing" : ""}`, "data-label": part }, text);
}

/** The parts one after the other; the longest recovery is as wide as there is room. */
function bar(one, longest) {
  const parts = partsOf(one).filter(([, , value]) => value > 0);
  let x = 0;
  const drawn = parts.map(([part, name, value]) => {
    const width = (value / longest) * 100;
    const rect = h("rect", { key: part, class: part, x: `${x.toFixed(3)}%`, y: "0", width: `${width.toFixed(3)}%`, height: "100%" },
      h("title", null, `${name} ${seconds(value)}`));
    x += width;
    return rect;
  });
  return h("svg", { class: "bar", "aria-hidden": "true", width: "100%", height: "8" }, drawn);
}

function more(left) {
  return left > 0 ? h("button", { type: "button", "data-more": "recoveries" }, `Show ${Math.min(left, SHOWN)} more of ${left}`) : null;
}
