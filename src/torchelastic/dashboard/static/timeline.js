// The job over time: the nodes of each world, recoveries, and charts on the same axis. Pure.

import { chart, gaps, gutter, rows, seriesOf, valueAt } from "./charts.js";
import { laneHeight, laneName, lanePath, lanesOf } from "./lanes.js";
import { marks, replicasOf, scale, ticks } from "./lanes.js";
import { extent } from "./picture.js";
import { h } from "./tree.js";
import { clock, count, counted, date, hours, oneLine } from "./words.js";
import { seconds, span, workerCount } from "./words.js";

const RANGES = [
  ["all", "whole job"],
  [21600, "6 h"],
  [3600, "1 h"],
  [600, "10 min"],
  [60, "1 min"],
];
/** Pixels: between charts, above the lanes, and for the numbers beside the lines. */
const GAP = 10;
const HEAD = 18;
const MARGIN = 58;
/** More lines down from the marks would hide what they cross. */
const MOST_HAIRS = 16;
/** The marks of recoveries, from their tips on. */
const SHAPES = { failure: "l-5 -9h10z", change: "l-4 -4.5 4 -4.5 4 4.5z" };

export function timeline(picture, state) {
  const { view, now } = picture;
  const all = extent(view, now);
  const aside = h("span", { class: "aside" }, summary(view));
  return h(
    "section",
    { key: "timeline", id: "timeline", "aria-labelledby": "timeline-title" },
    h(
      "div",
      { class: "row" },
      h("h2", { id: "timeline-title" }, "Worlds", aside),
      ranges(all, state.range),
    ),
    view.worlds.length === 0
      ? h("p", { class: "quiet" }, "No world has been formed yet.")
      : drawn(view, now, domain(all, state.range), state),
  );
}

function summary(view) {
  const world = view.worlds.at(-1);
  if (!world) return "";
  const size = `${workerCount(world.size, world.replica)} on ${counted(world.count, "node")}`;
  return `generation ${world.generation}: ${size}`;
}

/** Buttons for the ranges that are shorter than the job. */
function ranges([from, until], chosen) {
  const fitting = RANGES.filter(([length]) => length === "all" || length < until - from);
  if (fitting.length < 2) return null;
  const option = ([length, text]) => {
    const value = String(length);
    const input = { type: "radio", name: "range", value, checked: value === chosen };
    return h("label", { key: value }, h("input", input), h("span", null, text));
  };
  return h(
    "fieldset",
    { class: "ranges" },
    h("legend", { class: "unseen" }, "Span of time"),
    fitting.map(option),
  );
}

function domain([from, until], chosen) {
  return chosen === "all" ? [from, until] : [Math.max(from, until - Number(chosen)), until];
}

function drawn(view, now, shown, state) {
  const cursor = state.cursor === null ? null : shown[0] + state.cursor * (shown[1] - shown[0]);
  const below = cursor === null ? legend() : readout(view, cursor, now);
  return [drawing(view, shown, state.width, cursor), below, tables(view, now)];
}

/** The world and values at the cursor. */
function readout(view, wall, now) {
  const world = view.worlds.findLast((one) => one.began <= wall);
  const within = world && (world.ended === null || wall <= world.ended);
  const texts = [
    clock(wall, now),
    within ? `generation ${world.generation}, ${counted(world.count, "node")}` : "no world",
    ...seriesOf(view).map(({ name, text, points }) => `${name} ${text(valueAt(points, wall))}`),
  ];
  return h("p", { key: "below", class: "below user", role: "status" }, texts.join(" · "));
}

// --- the drawing ---------------------------------------------------------------------------------

function drawing(view, shown, width, cursor) {
  const [left, right] = [width < 560 ? 96 : 132, Math.max(width - MARGIN, 200)];
  const x = scale(shown, left, right);
  const frame = { domain: shown, left, right, x, breaks: gaps(view.worlds, x) };
  const lanes = [...replicasOf(view.worlds), ...lanesOf(view.worlds)];
  const tall = laneHeight(lanes);
  const pitch = tall + (tall > 10 ? 4 : 1);
  const bottom = HEAD + lanes.length * pitch;
  const charts = [];
  let top = bottom + GAP;
  for (const series of seriesOf(view)) {
    const { height, node } = chart(series, frame, top);
    charts.push(node);
    top += height + GAP;
  }
  return h(
    "svg",
    {
      class: "timeline",
      id: "drawing",
      width,
      height: top + 16,
      role: "group",
      tabindex: "0",
      "aria-label": `${label(view)}. Left and right arrows move a cursor`,
      "data-left": left,
      "data-right": right,
    },
    axis(frame, top),
    h(
      "g",
      { key: "lanes", role: "img", "aria-label": label(view) },
      lanes.map((lane, place) => laneOf(lane, view, frame, HEAD + place * pitch, tall)),
    ),
    charts,
    hovers(view, frame, bottom),
    recoveryMarks(view, frame, top),
    cursor === null ? null : hair("cursor", x(cursor), HEAD - 8, top),
  );
}

function label(view) {
  const changes = counted(view.recoveries.length, "change");
  return `${counted(view.worlds.length, "world")}, ${changes}; the tables below have the same data`;
}

function hair(kind, x, from, until) {
  return h("path", { key: kind, class: kind, d: `M${x.toFixed(1)} ${from}V${until}` });
}

function laneOf(lane, view, frame, y, height) {
  const name = oneLine(laneName(lane), 200);
  const mixed = lane.mixed ? "mixed" : "";
  const path = (odd) => lanePath(lane, view.worlds, odd, frame, y, height);
  return h(
    "g",
    { key: `lane ${name}` },
    height < 10 ? null : gutter(frame, y, height, name, "lane-name", laneTitle(lane)),
    h("rect", { class: "track", x: frame.left, y, width: frame.right - frame.left, height }),
    h("path", { class: `world even ${mixed}`, d: path(false) }),
    h("path", { class: `world odd ${mixed}`, d: path(true) }),
  );
}

function laneTitle(lane) {
  if (lane.title) return lane.title;
  const names = lane.names.slice(0, 20).map((name) => oneLine(name, 60));
  const more = lane.names.length - names.length;
  return (names.join(", ") || laneName(lane)) + (more > 0 ? ` and ${more} more` : "");
}

function axis(frame, bottom) {
  const { step, at } = ticks(frame.domain, frame.right - frame.left);
  const text = (wall) =>
    step >= 86400 ? date(wall).slice(5) : step >= 60 ? hours(wall) : clock(wall, wall);
  return h(
    "g",
    { key: "axis", class: "axis", "aria-hidden": "true" },
    at.map((wall) => {
      const x = frame.x(wall);
      return h(
        "g",
        { key: String(wall) },
        hair("tick", x, HEAD - 4, bottom),
        h("text", { x: x.toFixed(1), y: bottom + 12 }, text(wall)),
      );
    }),
  );
}

/** An invisible column per world with a tooltip. */
function hovers(view, frame, bottom) {
  const now = frame.domain[1];
  const column = (world) => {
    const [from, until] = [frame.x(world.began), frame.x(world.ended ?? now)];
    const place = { x: from.toFixed(1), width: Math.max(until - from, 1).toFixed(1) };
    return h(
      "rect",
      { key: String(world.generation), ...place, y: HEAD, height: bottom - HEAD },
      h("title", null, worldText(world, now)),
    );
  };
  return h(
    "g",
    { key: "hovers", class: "hovers", "aria-hidden": "true" },
    view.worlds.map(column),
  );
}

function worldText(world, now) {
  const size = `${workerCount(world.size, world.replica)} on ${counted(world.count, "node")}`;
  const lines = [
    `generation ${world.generation}: ${size}`,
    `${clock(world.began, now)} for ${seconds((world.ended ?? now) - world.began)}`,
    `started: ${oneLine(world.why, 200)}`,
  ];
  if (world.ended !== null) lines.push(`ended: ${oneLine(world.end_why, 200)}`);
  return lines.join("\n");
}

function recoveryMarks(view, frame, bottom) {
  const found = marks(view.recoveries, frame.x, frame.domain);
  const mark = ({ x, all }) => {
    const kind = all.some((one) => one.is_failure) ? "failure" : "change";
    const texts = all.map((one) => `${seconds(one.cost)}: ${oneLine(one.why, 160)}`);
    return h(
      "g",
      { key: String(all[0].generation), class: kind },
      found.length > MOST_HAIRS ? null : hair("hair", x, HEAD - 6, bottom),
      h("path", { class: "head", d: `M${x.toFixed(1)} ${HEAD - 4}${SHAPES[kind]}` }),
      all.length > 1 ? h("text", { x: x + 7, y: HEAD - 6 }, count(all.length)) : null,
      h("title", null, texts.join("\n")),
    );
  };
  return h("g", { key: "marks", "aria-hidden": "true" }, found.map(mark));
}

// --- below it ------------------------------------------------------------------------------------

function legend() {
  const swatch = (kind) => h("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
  const shape = (kind) =>
    h(
      "svg",
      { class: "timeline key", width: 12, height: 10, "aria-hidden": "true" },
      h("g", { class: kind }, h("path", { class: "head", d: `M6 9.5${SHAPES[kind]}` })),
    );
  return h(
    "ul",
    { key: "legend", class: "legend inline below" },
    h("li", null, swatch("even"), swatch("odd"), "in a world (shades alternate by generation)"),
    h("li", null, shape("failure"), "failure"),
    h("li", null, shape("change"), "other change"),
  );
}

function tables(view, now) {
  const series = seriesOf(view);
  const worldHeads = ["generation", "from", "for", "nodes", "workers", "why it started and ended"];
  const lineHeads = ["time", "step", ...series.map((one) => one.name)];
  const worlds = view.worlds.map((world) => [String(world.generation), worldRow(world, now)]);
  const lines = rows(series).map(([wall, step, ...values]) => [
    String(wall),
    [clock(wall, now), step === null ? "–" : count(step), ...values],
  ]);
  return [
    details("worlds-table", "Worlds as table", worldHeads, worlds.toReversed()),
    lines.length ? details("lines-table", "Charts as table", lineHeads, lines.toReversed()) : null,
  ];
}

function worldRow(world, now) {
  const why = oneLine(world.end_why, 300) || "unknown";
  return [
    world.generation,
    clock(world.began, now),
    span((world.ended ?? now) - world.began),
    count(world.count),
    count(world.size),
    `started: ${oneLine(world.why, 300)}; ${world.ended === null ? "running" : `ended: ${why}`}`,
  ];
}

function details(key, title, heads, body) {
  const cells = (all) => all.map((cell) => h("td", { class: "user" }, cell));
  const table = h(
    "table",
    null,
    h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", null, body.map(([id, all]) => h("tr", { key: id }, cells(all)))),
  );
  return h(
    "details",
    { key, id: key },
    h("summary", null, title),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table),
  );
}
