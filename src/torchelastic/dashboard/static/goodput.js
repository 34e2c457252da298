// Where the job's time went. Pure.

import { PARTS, ratioOf } from "./picture.js";
import { h } from "./tree.js";
import { counted, percent, seconds } from "./words.js";

/** Parts shorter than this (in seconds) are left out; a label needs this share of the bar. */
const LEAST = 0.001;
const ROOM = 0.14;

export function goodput(picture) {
  const found = picture.view.goodput;
  const aside = found ? `${ratioOf(found)} of ${seconds(found.total)}` : "";
  return h(
    "section",
    { key: "goodput", id: "goodput", "aria-labelledby": "goodput-title" },
    h("h2", { id: "goodput-title" }, "Goodput", h("span", { class: "aside" }, aside)),
    found && found.total > 0
      ? [bar(found), legend(found), notes(found, picture.view)]
      : h("p", { class: "quiet" }, "No time has passed yet."),
  );
}

/** [part, its name, seconds]. */
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
    const title = `${name} ${seconds(value)}, ${percent(share)}`;
    const whole = { width: "100%", height: "100%" };
    return h(
      "svg",
      { key: part, x: width(at), width: width(share), height: "100%" },
      h("rect", { class: part, ...whole }, h("title", null, title)),
      share < ROOM ? null : h("text", { class: part, x: "8", y: "50%", dy: "0.35em" }, name),
    );
  });
  const texts = parts(found).map(([, name, value]) => `${name} ${seconds(value)}`);
  const label = `Total ${seconds(found.total)}: ${texts.join(", ")}`;
  const size = { width: "100%", height: "28" };
  return h("svg", { class: "bar tall", ...size, role: "img", "aria-label": label }, drawn);
}

function width(share) {
  return `${(share * 100).toFixed(3)}%`;
}

function legend(found) {
  const item = ([part, name, value]) =>
    h(
      "li",
      { key: part },
      h("span", { class: `swatch ${part}`, "aria-hidden": "true" }),
      h("span", { class: "name" }, name),
      h("span", { class: "number" }, seconds(value)),
      h("span", { class: "number share" }, percent(value / found.total)),
    );
  const all = parts(found).map(item);
  return h("ul", { class: "legend", "aria-label": "Parts of the job's time" }, all);
}

/** How many steps were redone because of failures. */
export function again(found) {
  if (!found.redone_known) return "redone steps unknown, other than those in flight";
  return found.redone_steps
    ? `${counted(found.redone_steps, "step")} redone, plus those in flight`
    : "only steps in flight were redone";
}

function notes(found, view) {
  const all = [];
  if (!found.steps_known) {
    all.push("No step was seen, so the time spent on training is unknown.");
  }
  if (found.disruptions) {
    const ended = `${counted(found.disruptions, "generation")} ended by a failure`;
    all.push(found.steps_known ? `${ended}; ${again(found)}.` : `${ended}.`);
  }
  if (found.active_nodes !== null && (view.max_nodes ?? 1) > 1) {
    const most = view.max_nodes;
    const mean = (share) => `${(share * most).toFixed(1)} of ${most} nodes`;
    const [active, there] = [mean(found.active_nodes), mean(found.available_nodes)];
    all.push(`On average ${active} trained and ${there} were available.`);
  }
  return all.map((text) => h("p", { class: "quiet" }, text));
}
