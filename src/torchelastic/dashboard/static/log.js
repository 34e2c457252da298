// The last events, the newest first. Pure.

import { h } from "./tree.js";
import { clock, oneLine } from "./words.js";

const HEADS = ["time", "node", "event", "what happened"];

export function log(picture) {
  const title = "Last events";
  const isEmpty = picture.log.length === 0;
  const region = { class: "scroll events", tabindex: "0", role: "region", "aria-label": title };
  return h(
    "section",
    { key: "log", id: "log", "aria-labelledby": "log-title" },
    h("h2", { id: "log-title" }, title),
    isEmpty
      ? h("p", { class: "quiet" }, "No events yet.")
      : h("div", region, table(picture)),
  );
}

function table({ log: all, now }) {
  const heads = HEADS.map((name) => h("th", { scope: "col" }, name));
  const rows = keyed(all).map(([key, event]) => row(key, event, now));
  return h(
    "table",
    null,
    h("thead", { class: "unseen" }, h("tr", null, heads)),
    h("tbody", null, rows.toReversed()),
  );
}

/** Rows keep their elements when others come: the same event may occur twice at one moment. */
function keyed(all) {
  const seen = new Map();
  return all.map((event) => {
    const key = `${event.wall} ${event.node} ${event.type}`;
    const again = seen.get(key) ?? 0;
    seen.set(key, again + 1);
    return [`${key} ${again}`, event];
  });
}

function row(key, event, now) {
  return h(
    "tr",
    { key },
    h("td", { class: "when" }, clock(event.wall, now)),
    h("td", { class: "node-name", title: oneLine(event.node) }, oneLine(event.node, 60)),
    h("td", { class: "type" }, oneLine(event.type, 40)),
    h("td", { class: "user" }, oneLine(event.text, 400)),
  );
}
