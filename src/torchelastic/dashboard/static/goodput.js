// Where the job's time went. Pure.

import { h } from "./tree.js";
import { PARTS } from "./picture.js";
import { counted, percent, seconds } from "./words.js";

// Parts below are not named, and a label needs so much of the bar's width.
const LEAST = 0.001;
const ROOM = 0.14;

export function goodput(picture) {
  const found = picture.view.goodput;
  return h(
    "section",
    { key: "goodput", id: "goodput", "aria-labelledby": "goodput-title" },
    h("h2", { id: "goodput-title" }, "Goodput", h("span", { class: "aside" }, found ? `${percent(found.ratio)} of ${seconds(found.total)}` : "")),
    found && found.total > 0 ? [bar(found), legend(found), notes(found, picture.view)] : h("p", { class: "quiet" }, "No time has passed yet."),
  );
}

function parts(found) {
  const all = { productive: found.productive, ...found.parts };
  return Object.keys(PARTS)
    .map((part) => [part, PARTS[part], all[part] ?? 0])
    .filter(([, , value]) => value >= LEAST);
}

function bar(found) {
  let passed = 0;
  const drawn = parts(found).map(([part, name, value]) => {
    const share = value / found.total;
    const at = passed;
    passed += share;
    return h(
      "svg",
      { key: part, x: pct(at), width: pct(share), height: "100%" },
      h("rect", { class: part, width: "100%", height: "100%" }, h("title", null, `${name} ${seconds(value)}, ${percent(share)}`)),
      share >= ROOM ? h("text", { class: `in ${part}`, x: "8", y: "50%", dy: "0.35em" }, name) : null,
    );
  });
  return h("svg", { class: "bar tall", width: "100%", height: "28", role: "img", "aria-label": label(found) }, drawn);
}

function pct(share) {
  return `${(share * 100).toFixed(3)}%`;
}

function label(found) {
  const told = parts(found).map(([, name, value]) => `${name} ${seconds(value)}`);
  return `Of ${seconds(found.total)}: ${told.join(", ")}`;
}

function legend(found) {
  return h(
    "ul",
    { class: "legend", "aria-label": "Parts of the job's time" },
    parts(found).map(([part, name, value]) =>
      h(
        "li",
        { key: part },
        h("span", { class: `swatch ${part}`, "aria-hidden": "true" }),
        h("span", { class: "name" }, name),
        h("span", { class: "number" }, seconds(value)),
        h("span", { class: "number share" }, percent(value / found.total)),
      ),
    ),
  );
}

function notes(found, view) {
  const told = [];
  if (!found.steps_known) told.push("This script does not tell its steps: all the time that its workers ran counts as training.");
  if (found.disruptions) told.push(`${counted(found.disruptions, "generation")} ended by a failure; ${counted(found.redone_steps, "step")} done again.`);
  if (found.active_nodes !== null && (view.max_nodes ?? 1) > 1) {
    told.push(`Of ${view.max_nodes} nodes, ${percent(found.active_nodes)} were in a world and ${percent(found.available_nodes)} there, over the whole time.`);
  }
  return told.map((text) => h("p", { class: "quiet" }, text));
}
