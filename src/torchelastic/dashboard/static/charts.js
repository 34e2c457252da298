// Line charts over time: the step rate, and each metric that the script reports. Pure.

import { h } from "./tree.js";
import { number, oneLine, rate } from "./words.js";

const HEIGHT = 64;
const PAD = 6;
const VISIBLE = 1.5;

/**
 * The charts below the lanes: { name, points: [[wall, step, value]], text, zero, last }.
 * The step rate of a world ends at 0, so the job's last rate is shown instead.
 */
export function seriesOf(view) {
  const all = [{ name: "step rate", points: view.rates, text: rate, zero: true, last: view.rate }];
  for (const [name, points] of Object.entries(view.metrics)) {
    const last = view.reported[name];
    all.push({ name: oneLine(name, 40), points, text: value, zero: false, last });
  }
  return all.filter((series) => series.points.length > 0);
}

function value(given) {
  return given === null ? "not a number" : number(given);
}

/** The points of a series in a span of time, and one before and after it. */
export function within(points, [from, until]) {
  const first = points.findIndex(([wall]) => wall >= from);
  if (first < 0) return points.slice(-1);
  const beyond = points.findIndex(([wall]) => wall > until);
  return points.slice(Math.max(0, first - 1), beyond < 0 ? undefined : beyond + 1);
}

/** Lowest and highest value; a flat line is in the middle. */
export function bounds(points, zero) {
  const values = points.map((point) => point[2]).filter(Number.isFinite);
  if (!values.length) return null;
  const low = zero ? Math.min(0, ...values) : Math.min(...values);
  const high = Math.max(...values);
  return high > low ? [low, high] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
}

/** Times between two worlds that are wide enough to see: lines break there. */
export function gaps(worlds, x) {
  const ends = worlds.map((world) => world.ended);
  return ends.filter((end, place) => end && x(worlds[place + 1]?.began ?? end) - x(end) >= VISIBLE);
}

/** A line through the points; it breaks at gaps, and at values that are not numbers. */
export function linePath(points, breaks, x, y) {
  let path = "";
  let last = null;
  for (const [wall, , value] of points) {
    if (!Number.isFinite(value)) {
      last = null;
      continue;
    }
    const joins = last !== null && !breaks.some((moment) => moment > last && moment <= wall);
    path += `${joins ? "L" : "M"}${x(wall).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!joins) path += "h0.01"; // a point without a neighbour is a dot
    last = wall;
  }
  return path;
}

/** One chart of the timeline, `top` pixels from above. */
export function chart(series, frame, top) {
  const points = within(series.points, frame.domain);
  const [low, high] = bounds(points, series.zero) ?? [0, 1];
  const y = (value) => top + PAD + (HEIGHT - 2 * PAD) * (1 - (value - low) / (high - low));
  const last = series.text(series.last === undefined ? points.at(-1)?.[2] : series.last);
  const plot = { x: frame.left, y: top, width: frame.right - frame.left, height: HEIGHT };
  const node = h(
    "g",
    { key: series.name, role: "img", "aria-label": alternative(series, low, high, last) },
    h("rect", { class: "plot", ...plot }),
    gutter(frame, top, 20, series.name, "lane-name"),
    gutter(frame, top + 18, 20, last, "value"),
    h("text", { class: "bound", x: frame.right + 6, y: top + 10 }, number(high)),
    h("text", { class: "bound", x: frame.right + 6, y: top + HEIGHT - 2 }, number(low)),
    h("path", { class: "line", d: linePath(points, frame.breaks, frame.x, y) }),
  );
  return { height: HEIGHT, node };
}

function alternative(series, low, high, last) {
  return `${series.name}: last ${last}, between ${number(low)} and ${number(high)}`;
}

/** A text left of the drawing, cut to the room there is. */
export function gutter(frame, y, height, text, kind, title = text) {
  const room = Math.floor((frame.left - 8) / 6.7);
  const cut = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  return h("svg", { x: 0, y, width: frame.left - 8, height },
    h("text", { class: kind, x: 0, y: "50%", dy: "0.35em" }, cut, h("title", null, title)));
}

/** Some points of all series as rows of a table, at the times of the first series. */
export function rows(all, most = 20) {
  const base = all[0]?.points ?? [];
  const every = Math.max(1, Math.ceil(base.length / most));
  const picked = base.filter((_, place) => (base.length - 1 - place) % every === 0);
  const values = (wall) => all.map(({ text, points }) => text(valueAt(points, wall)));
  return picked.map(([wall, step]) => [wall, step, ...values(wall)]);
}

/** The last value up to a time. */
export function valueAt(points, wall) {
  const before = points.findLast(([at]) => at <= wall);
  return before ? before[2] : null;
}
