// Nodes, each with its ranks on demand: thousands of ranks cost nothing while closed. Pure.

import { h } from "./tree.js";
import { ago, count, counted, number, oneLine, ranges, rate, seconds } from "./words.js";

/** Nodes that are shown at first. */
const SHOWN = 24;
/** Workers whose part of the bar of micro-batches has a text. */
const MOST_NAMED = 8;
/** The tone of each node state. */
const TONES = {
  running: "good",
  joined: "busy",
  starting: "busy",
  rejoining: "warn",
  leaving: "warn",
  lost: "bad",
  died: "bad",
};
const AWAY = ["lost", "died", "rejoining"];

export function nodes(picture, state) {
  const { view, now } = picture;
  const all = summaries(view);
  const shown = all.slice(0, SHOWN + (state.more.get("nodes") ?? 0));
  const aside = h("span", { class: "aside" }, summary(view, all));
  return h(
    "section",
    { key: "nodes", id: "nodes", "aria-labelledby": "nodes-title" },
    h("h2", { id: "nodes-title" }, "Nodes and ranks", aside),
    view.stragglers.map(straggler),
    shares(view.ranks),
    h("div", { key: "list", class: "nodes" }, head(), shown.map((one) => row(one, now, state))),
    more(all.length - shown.length),
    view.unnamed ? unnamed(view.unnamed) : null,
  );
}

/** A node with its ranks; those in trouble first. */
export function summaries(view) {
  const slow = new Map(view.stragglers.map((one) => [one.rank, one]));
  const named = (node) => [node.name, { ...node, ranks: [], slow: [] }];
  const byName = new Map(view.nodes.map(named));
  for (const rank of view.ranks) {
    if (!byName.has(rank.node)) byName.set(...named({ name: rank.node, state: "running" }));
    const node = byName.get(rank.node);
    node.ranks.push({ ...rank, slow: slow.get(rank.rank) });
    if (slow.has(rank.rank)) node.slow.push(rank.rank);
  }
  const trouble = (node) => Number(AWAY.includes(node.state) || node.slow.length > 0);
  return [...byName.values()].sort((one, other) => trouble(other) - trouble(one));
}

function summary(view, all) {
  const running = all.filter((node) => node.state === "running").length + view.unnamed;
  const texts = [];
  texts.push(view.ended === null ? `${count(running)} in the world` : counted(all.length, "node"));
  if (view.ranks.length) texts.push(counted(view.ranks.length, "rank"));
  if (view.straggler_seconds >= 1) {
    texts.push(`stragglers cost ${seconds(view.straggler_seconds)}`);
  }
  return texts.join(", ");
}

/** With a fixed batch: how many micro-batches each worker ran of the last step, as one bar. */
function shares(ranks) {
  const known = ranks.filter((rank) => rank.share > 0);
  if (!known.length) return null;
  const total = known.reduce((sum, rank) => sum + rank.share, 0);
  const percents = (number) => `${((100 * number) / total).toFixed(3)}%`;
  let passed = 0;
  const parts = known.map((rank) => {
    const text = `rank ${rank.rank}: ${rank.share}`;
    const [at, width] = [percents(passed), percents(rank.share)];
    passed += rank.share;
    return h(
      "svg",
      { key: `${rank.rank}`, x: at, width, height: "100%" },
      h("rect", { class: "micro", width: "100%", height: "100%" }, h("title", null, text)),
      known.length > MOST_NAMED ? null : h("text", { x: "8", y: "50%", dy: "0.35em" }, text),
    );
  });
  const label = `Micro-batches of the last step: ${count(total)}`;
  const size = { width: "100%", height: "28" };
  return h(
    "div",
    { key: "shares", id: "shares" },
    h("p", { class: "quiet" }, label),
    h("svg", { class: "bar tall", ...size, role: "img", "aria-label": label }, parts),
  );
}

function straggler(slow) {
  const tag = h("span", { class: "tag warn" }, "straggler");
  const key = `slow ${slow.rank}`;
  return h("p", { key, class: "straggler user" }, tag, ` ${oneLine(slow.text, 300)}`);
}

function more(left) {
  if (left <= 0) return null;
  const text = `Show ${count(Math.min(SHOWN, left))} more of ${counted(left, "node")}`;
  return h("button", { key: "more", type: "button", "data-more": "nodes" }, text);
}

function unnamed(many) {
  const text = `and ${counted(many, "more node")} whose names this node does not know`;
  return h("p", { key: "unnamed", class: "quiet" }, text);
}

function head() {
  const names = ["node", "state", "ranks", "step", "rate", ""];
  const cells = names.map((name) => h("span", null, name));
  return h("div", { key: "head", class: "node-row head", "aria-hidden": "true" }, cells);
}

function row(node, now, state) {
  const key = `node ${node.name}`;
  const tone = TONES[node.state] ?? "still";
  const known = node.ranks.map((rank) => rank.rank);
  const cells = [
    h("span", { class: "user name" }, oneLine(node.name, 120)),
    h("span", null, h("span", { class: `sign ${tone}`, "aria-hidden": "true" }), node.state),
    h("span", { "data-label": "ranks" }, known.length ? ranges(known, 3) : "–"),
    h("span", { class: "number", "data-label": "step" }, steps(node.ranks)),
    h("span", { class: "number", "data-label": "rate" }, rate(middle(node.ranks))),
    h("span", { class: "tags" }, tags(node, now)),
  ];
  if (!known.length) return h("div", { key, class: "node-row" }, cells);
  return h(
    "details",
    { key, class: "node", "data-open": key },
    h("summary", { class: "node-row" }, cells),
    state.open.has(key) ? rankTable(node) : null,
  );
}

function tags(node, now) {
  const all = [];
  const here = !["ended", ...AWAY].includes(node.state);
  const { slow, exitcode } = node;
  if (node.leader && here) all.push(["leader", "calm"]);
  if (node.hosting && here) all.push(["hosts the rendezvous", "calm"]);
  if (slow.length === 1) all.push([`straggler: rank ${slow[0]}`, "warn"]);
  if (slow.length > 1) all.push([counted(slow.length, "straggler"), "warn"]);
  if (node.held) all.push([oneLine(node.held, 120), "warn"]);
  if (Number.isFinite(exitcode)) all.push([`exit code ${exitcode}`, "calm"]);
  if (AWAY.includes(node.state) && node.last_seen) {
    all.push([`last seen ${ago(node.last_seen, now)}`, "bad"]);
  }
  return all.map(([text, tone]) => h("span", { class: `tag ${tone}` }, text));
}

/** `120`, or from the slowest to the furthest: `118–120`. */
function steps(all) {
  const known = all.map((rank) => rank.step).filter(Number.isFinite);
  if (!known.length) return "–";
  const [least, most] = [Math.min(...known), Math.max(...known)];
  return least === most ? count(most) : `${count(least)}–${count(most)}`;
}

function middle(all) {
  const known = all.map((rank) => rank.rate).filter(Number.isFinite).sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}

function rankTable(node) {
  const names = ["rank", "step", "rate", "micro-batches", ""];
  const shared = node.ranks.some((rank) => Number.isFinite(rank.share));
  const shown = names.filter((name) => shared || name !== "micro-batches");
  const heads = shown.map((name) => h("th", { scope: "col" }, name));
  const label = `Ranks of ${oneLine(node.name, 60)}`;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, heads)),
      h("tbody", null, node.ranks.map((rank) => rankRow(rank, shared))),
    ),
  );
}

function rankRow(rank, shared) {
  return h(
    "tr",
    { key: `${rank.rank}` },
    h("td", { class: "number" }, rank.rank),
    h("td", { class: "number" }, Number.isFinite(rank.step) ? count(rank.step) : "–"),
    h("td", { class: "number" }, rate(rank.rate)),
    shared ? h("td", { class: "number" }, rank.share ?? "–") : null,
    h("td", null, rank.slow ? slowness(rank.slow) : null),
  );
}

function slowness(slow) {
  const times = number(slow.seconds_per_step / slow.usual);
  const [own, usual] = [seconds(slow.seconds_per_step), seconds(slow.usual)];
  const text = ` ${own} per step, others ${usual}: ${times} times as long`;
  return [h("span", { class: "tag warn" }, "straggler"), text];
}
