// The last events, the newest first. Pure.

import { h } from "./tree.js";
import { clock, oneLine } from "./words.js";

export function log(picture) {
  const all = picture.log.toReversed();
  return h(
    "section",
    { key: "log", id: "log", "aria-labelledby": "log-title" },
    h("h2", { id: "log-title" }, "Last events"),
    all.length === 0
      ? h("p", { class: "quiet" }, "Nothing has been told yet.")
      : h("div", { class: "scroll events", tabindex: "0", role: "region", "aria-label": "Last events" },
          h("table", null,
            h("thead", { class: "unseen" }, h("tr", null, ["time", "node", "event", "what happened"].map((name) => h("th", { scope: "col" }, name)))),
            h("tbody", null, keyed(all).map(([key, event]) => row(key, event, picture.now))))),
  );
}

/** Rows keep their elements when others come: the same event may be told twice in one moment. */
function keyed(all) {
  const seen = new Map();
  return all.toReversed().map((event) => {
    const key = `${event.wall} ${event.node} ${event.type}`;
    const again = seen.get(key) ?? 0;
    seen.set(key, again + 1);
    return [`${key} ${again}`, event];
  }).reverse();
}

function row(key, event, now) {
  return h("tr", { key },
    h("td", { class: "when" }, clock(event.wall, now)),
    h("td", { class: "node-name", title: oneLine(event.node) }, oneLine(event.node, 60)),
    h("td", { class: "type" }, oneLine(event.type, 40)),
    h("td", { class: "user" }, oneLine(event.text, 400)));
}
