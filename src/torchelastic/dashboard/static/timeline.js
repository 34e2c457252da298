// The job over time: who was in which world, recoveries, and lines below on the same clock. Pure.

import { chart, gaps, gutter, rows, seriesOf, valueAt } from "./charts.js";
import { laneHeight, laneName, lanePath, lanesOf, marks, scale, ticks } from "./lanes.js";
import { extent } from "./picture.js";
import { h } from "./tree.js";
import { clock, count, counted, date, hours, oneLine, seconds, span } from "./words.js";

const RANGES = [["all", "whole job"], [21600, "6 h"], [3600, "1 h"], [600, "10 min"], [60, "1 min"]];
const GAP = 10;
const HEAD = 18;
/** More lines down from the marks would hide what they cross. */
const MOST_HAIRS = 16;
/** For the numbers beside the lines. */
const MARGIN = 44;

export function timeline(picture, state) {
  const { view, now } = picture;
  const all = extent(view, now);
  return h(
    "section",
    { key: "timeline", id: "timeline", "aria-labelledby": "timeline-title" },
    h("div", { class: "row" },
      h("h2", { id: "timeline-title" }, "Worlds", h("span", { class: "aside" }, summary(view))),
      ranges(all, state.range)),
    view.worlds.length === 0
      ? h("p", { class: "quiet" }, "No world has been formed yet.")
      : drawn(view, now, domain(all, state.range), state),
  );
}

function drawn(view, now, shown, state) {
  const below = state.cursor === null ? legend() : readout(view, shown[0] + state.cursor * (shown[1] - shown[0]), now);
  return [drawing(view, shown, state), below, tables(view, now)];
}

/** What was at the moment that is pointed at. */
function readout(view, wall, now) {
  const world = view.worlds.findLast((one) => one.began <= wall);
  const within = world && (world.ended === null || wall <= world.ended);
  const texts = [
    clock(wall, now),
    within ? `generation ${world.generation}, ${counted(world.count, "node")}` : "no world",
    ...seriesOf(view).map((series) => `${series.name} ${series.text(valueAt(series.points, wall))}`),
  ];
  return h("p", { key: "below", class: "below", role: "status" }, texts.join(" · "));
}

function summary(view) {
  if (!view.worlds.length) return "";
  const world = view.worlds.at(-1);
  return `generation ${world.generation}: ${counted(world.size, "worker")} on ${counted(world.count, "node")}`;
}

/** Only those shorter than the job. */
function ranges([from, until], chosen) {
  const fitting = RANGES.filter(([length]) => length === "all" || length < until - from);
  if (fitting.length < 2) return null;
  const option = ([length, text]) =>
    h("label", { key: `${length}` },
      h("input", { type: "radio", name: "range", value: `${length}`, checked: String(length) === chosen }), h("span", null, text));
  return h("fieldset", { class: "ranges" }, h("legend", { class: "unseen" }, "Span of time"), fitting.map(option));
}

function domain([from, until], chosen) {
  return chosen === "all" ? [from, until] : [Math.max(from, until - Number(chosen)), until];
}

function drawing(view, shown, { width, cursor }) {
  const lanes = lanesOf(view.worlds);
  const [left, right] = [width < 560 ? 96 : 132, width - MARGIN];
  const x = scale(shown, left, right);
  const frame = {
    domain: shown, left, right, x, breaks: gaps(view.worlds, x),
    cursor: cursor === null ? null : shown[0] + cursor * (shown[1] - shown[0]),
  };
  const tall = laneHeight(lanes);
  const pitch = tall + (tall > 10 ? 4 : 1);
  const bottom = HEAD + lanes.length * pitch;
  let top = bottom + GAP;
  const charts = seriesOf(view).flatMap((series) => {
    const { height, nodes } = chart(series, frame, top);
    top += height ? height + GAP : 0;
    return nodes;
  });
  return h(
    "svg",
    {
      class: "timeline", id: "drawing", width, height: top + 16, role: "group", tabindex: "0",
      "aria-label": `${label(view)}. Left and right arrows move a cursor`, "data-left": left, "data-right": right,
    },
    axis(frame, top),
    h("g", { key: "lanes", role: "img", "aria-label": label(view) },
      lanes.map((lane, place) => laneNodes(lane, view.worlds, frame, HEAD + place * pitch, tall, shown[1]))),
    charts,
    hovers(view, frame, bottom, shown[1]),
    recoveryMarks(view, frame, top),
    frame.cursor === null ? null : h("path", { key: "cursor", class: "cursor", d: `M${frame.x(frame.cursor).toFixed(1)} ${HEAD - 8}V${top}` }),
  );
}

function label(view) {
  return `${counted(view.worlds.length, "world")}, ${counted(view.recoveries.length, "recovery").replace("recoverys", "recoveries")}; the tables below say the same`;
}

function laneNodes(lane, worlds, frame, y, height, now) {
  const name = oneLine(laneName(lane), 200);
  const path = (odd) => lanePath(lane, worlds, odd, frame.x, y, height, now);
  return h(
    "g",
    { key: `lane ${name}` },
    height < 10 ? null : gutter(frame, y, height, name, "lane-name", laneTitle(lane)),
    h("rect", { class: "track", x: frame.left, y, width: frame.right - frame.left, height }),
    h("path", { class: `world even ${lane.mixed ? "mixed" : ""}`, d: path(false) }),
    h("path", { class: `world odd ${lane.mixed ? "mixed" : ""}`, d: path(true) }),
  );
}

function laneTitle(lane) {
  const names = lane.names.slice(0, 20).map((name) => oneLine(name, 60)).join(", ");
  return lane.names.length > 20 ? `${names} and ${lane.names.length - 20} more` : names || laneName(lane);
}

function axis(frame, bottom) {
  const { step, at } = ticks(frame.domain, frame.right - frame.left);
  const text = (wall) => (step >= 86400 ? date(wall).slice(5) : step >= 60 ? hours(wall) : clock(wall, wall));
  return h(
    "g",
    { key: "axis", class: "axis", "aria-hidden": "true" },
    at.map((wall) => [
      h("path", { key: `l${wall}`, d: `M${frame.x(wall).toFixed(1)} ${HEAD - 4}V${bottom}` }),
      h("text", { key: `t${wall}`, x: Math.min(frame.x(wall), frame.right - 28).toFixed(1), y: bottom + 12 }, text(wall)),
    ]),
  );
}

/** A column for each world that says what it was when pointed at. */
function hovers(view, frame, bottom, now) {
  return h(
    "g",
    { key: "hovers", class: "hovers", "aria-hidden": "true" },
    view.worlds.map((world) => {
      const [from, until] = [frame.x(world.began), frame.x(world.ended ?? now)];
      return h("rect", { key: `${world.generation}`, x: from.toFixed(1), y: HEAD, width: Math.max(until - from, 1).toFixed(1), height: bottom - HEAD },
        h("title", null, worldText(world, now)));
    }),
  );
}

function worldText(world, now) {
  const lines = [
    `generation ${world.generation}: ${counted(world.size, "worker")} on ${counted(world.count, "node")}`,
    `${clock(world.began, now)} for ${seconds((world.ended ?? now) - world.began)}`,
    `began: ${oneLine(world.why, 200)}`,
  ];
  return (world.ended === null ? lines : [...lines, `ended: ${oneLine(world.end_why, 200)}`]).join("\n");
}

function recoveryMarks(view, frame, bottom) {
  const found = marks(view.recoveries, frame.x, frame.domain);
  return h(
    "g",
    { key: "marks", "aria-hidden": "true" },
    found.map(({ x, all }) => {
      const failed = all.some((one) => one.is_failure);
      const at = x.toFixed(1);
      return h(
        "g",
        { key: `${all[0].generation}`, class: failed ? "failure" : "change" },
        found.length > MOST_HAIRS ? null : h("path", { class: "hair", d: `M${at} ${HEAD - 6}V${bottom}` }),
        h("path", { class: "head", d: failed ? `M${at} ${HEAD - 4}l-5 -9h10z` : `M${at} ${HEAD - 4}l-4 -4.5 4 -4.5 4 4.5z` }),
        all.length > 1 ? h("text", { x: x + 7, y: HEAD - 6 }, count(all.length)) : null,
        h("title", null, all.map((one) => `${seconds(one.cost)}: ${oneLine(one.why, 160)}`).join("\n")),
      );
    }),
  );
}

function legend() {
  const shape = (kind, d) => h("svg", { class: `timeline key ${kind}`, width: 12, height: 10, "aria-hidden": "true" }, h("g", { class: kind }, h("path", { class: "head", d })));
  return h(
    "ul",
    { key: "legend", class: "legend inline below" },
    h("li", null, h("span", { class: "swatch even", "aria-hidden": "true" }), h("span", { class: "swatch odd", "aria-hidden": "true" }), "in a world, by turns of the generations"),
    h("li", null, shape("failure", "M6 9.500l-5 -9h10z"), "a failure"),
    h("li", null, shape("change", "M6 9.500l-4 -4.500 4 -4.500 4 4.500z"), "another change"),
  );
}

function tables(view, now) {
  const series = seriesOf(view);
  return [
    details("worlds-table", `Worlds as a table`, ["generation", "from", "for", "nodes", "workers", "why it began, why it ended"],
      view.worlds.toReversed().map((world) => [String(world.generation), worldRow(world, now)])),
    series.length === 0 ? null :
      details("series-table", "Lines as a table", ["time", "step", ...series.map((one) => one.name)],
        rows(series).toReversed().map(([wall, step, ...values]) => [String(wall), [clock(wall, now), step === null ? "–" : count(step), ...values]])),
  ];
}

function worldRow(world, now) {
  const ended = world.ended === null ? "goes on" : `ended: ${oneLine(world.end_why, 300) || "not known"}`;
  return [
    world.generation,
    clock(world.began, now),
    span((world.ended ?? now) - world.began),
    count(world.count),
    count(world.size),
    `began: ${oneLine(world.why, 300)}; ${ended}`,
  ];
}

function details(key, title, heads, body) {
  return h(
    "details",
    { key, id: key },
    h("summary", null, title),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
      h("table", null,
        h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", null, body.map(([id, cells]) => h("tr", { key: id }, cells.map((cell) => h("td", { class: "user" }, cell))))))),
  );
}
