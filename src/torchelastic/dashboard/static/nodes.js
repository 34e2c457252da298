// Nodes, each with its ranks on demand: thousands of ranks cost nothing while they are shut. Pure.

import { h } from "./tree.js";
import { ago, count, counted, number, oneLine, ranges, rate, seconds } from "./words.js";

const SHOWN = 24;
/** States of a node, and how they are to be taken. */
const TONES = { running: "good", ended: "still", spare: "still", joined: "busy", starting: "busy", rejoining: "warn", leaving: "warn", lost: "bad", died: "bad" };

export function nodes(picture, state) {
  const { view, now } = picture;
  const all = summaries(view);
  const shown = all.slice(0, SHOWN + (state.more.get("nodes") ?? 0));
  return h(
    "section",
    { key: "nodes", id: "nodes", "aria-labelledby": "nodes-title" },
    h("h2", { id: "nodes-title" }, "Nodes and ranks", h("span", { class: "aside" }, summary(view, all))),
    view.stragglers.map((slow) => h("p", { key: `slow ${slow.rank}`, class: "straggler user" }, h("span", { class: "tag warn" }, "straggler"), ` ${oneLine(slow.text, 300)}`)),
    h("div", { key: "list", class: "nodes" }, head(), shown.map((node) => row(node, now, state))),
    all.length > shown.length
      ? h("button", { key: "more", type: "button", "data-more": "nodes" }, `Show ${count(Math.min(SHOWN, all.length - shown.length))} more of ${counted(all.length - shown.length, "node")}`)
      : null,
    view.unnamed ? h("p", { key: "unnamed", class: "quiet" }, `and ${counted(view.unnamed, "node")} more, not known by name here`) : null,
  );
}

/** A node with its ranks; those in trouble first. */
export function summaries(view) {
  const slow = new Map(view.stragglers.map((one) => [one.rank, one]));
  const byName = new Map(view.nodes.map((node) => [node.name, { ...node, ranks: [], slow: [] }]));
  for (const rank of view.ranks) {
    if (!byName.has(rank.node)) byName.set(rank.node, { name: rank.node, state: "running", last_seen: null, ranks: [], slow: [] });
    const node = byName.get(rank.node);
    node.ranks.push(slow.has(rank.rank) ? { ...rank, slow: slow.get(rank.rank) } : rank);
    if (slow.has(rank.rank)) node.slow.push(rank.rank);
  }
  const trouble = (node) => Number(["lost", "died", "rejoining"].includes(node.state) || node.slow.length > 0);
  return [...byName.values()].sort((one, other) => trouble(other) - trouble(one));
}

function summary(view, all) {
  const running = all.filter((node) => node.state === "running").length + view.unnamed;
  const ranks = view.ranks.length ? `, ${counted(view.ranks.length, "rank")}` : "";
  const told = view.phase === "ended" ? counted(all.length, "node") : `${count(running)} in the world`;
  return `${told}${ranks}`;
}

function head() {
  return h("div", { key: "head", class: "node-row head", "aria-hidden": "true" },
    ["node", "state", "ranks", "step", "rate", ""].map((name) => h("span", null, name)));
}

function row(node, now, state) {
  const key = `node ${node.name}`;
  const open = state.open.has(key);
  const cells = [
    h("span", { class: "user name" }, oneLine(node.name, 120)),
    h("span", { class: "state" }, h("span", { class: `sign ${TONES[node.state] ?? "still"}`, "aria-hidden": "true" }), node.state),
    h("span", { "data-label": "ranks" }, node.ranks.length ? ranges(node.ranks.map((rank) => rank.rank), 3) : "–"),
    h("span", { class: "number", "data-label": "step" }, steps(node.ranks)),
    h("span", { class: "number", "data-label": "rate" }, rate(middle(node.ranks))),
    h("span", { class: "tags" }, tags(node, now)),
  ];
  if (!node.ranks.length) return h("div", { key, class: "node-row" }, cells);
  return h("details", { key, class: "node", "data-open": key },
    h("summary", { class: "node-row" }, cells), open ? rankTable(node) : null);
}

function tags(node, now) {
  const told = [];
  if (node.leader && node.state !== "ended") told.push(["leader", "calm"]);
  if (node.hosting && node.state !== "ended") told.push(["hosts the rendezvous", "calm"]);
  if (node.slow.length) told.push([node.slow.length === 1 ? `straggler: rank ${node.slow[0]}` : counted(node.slow.length, "straggler"), "warn"]);
  if (node.exitcode !== null && node.exitcode !== undefined) told.push([`exit code ${node.exitcode}`, "calm"]);
  if (["lost", "died", "rejoining"].includes(node.state) && node.last_seen) told.push([`last heard ${ago(node.last_seen, now)}`, "bad"]);
  return told.map(([text, tone]) => h("span", { key: text, class: `tag ${tone}` }, text));
}

/** `120`, or from the slowest to the furthest: `118–120`. */
function steps(all) {
  const known = all.map((rank) => rank.step).filter((step) => step !== null);
  if (!known.length) return "–";
  const [least, most] = [Math.min(...known), Math.max(...known)];
  return least === most ? count(most) : `${count(least)}–${count(most)}`;
}

function middle(all) {
  const known = all.map((rank) => rank.rate).filter((one) => one !== null).sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}

function rankTable(node) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ranks of ${oneLine(node.name, 60)}` },
    h("table", null,
      h("thead", null, h("tr", null, ["rank", "step", "rate", ""].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, node.ranks.map(rankRow))));
}

function rankRow(rank) {
  const slow = rank.slow;
  const text = slow ? `${seconds(slow.seconds_per_step)} a step, others ${seconds(slow.usual)}: ${number(slow.seconds_per_step / slow.usual)} times as long` : "";
  return h("tr", { key: `${rank.rank}` },
    h("td", { class: "number" }, rank.rank),
    h("td", { class: "number" }, rank.step === null ? "–" : count(rank.step)),
    h("td", { class: "number" }, rate(rank.rate)),
    h("td", null, slow ? [h("span", { class: "tag warn" }, "straggler"), ` ${text}`] : null));
}
