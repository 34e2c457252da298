// Numbers, times and users' texts as the page shows them. Pure.

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

// Control characters except newline and tab; marks that are invisible or change the direction of
// writing; lone surrogates.
const UNPRINTABLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]|\\p{Cs}",
  "gu",
);
// More marks than this on one character would be drawn over the lines above and below.
const PILE = /(\p{M}{3})\p{M}+/gu;

// Longer texts that are cut also show their length.
const ODD = 2000;

/** A user's text with control and invisible characters escaped. */
export function plain(text, most = 20000) {
  const given = String(text ?? "");
  const cut = given.slice(0, most).replace(UNPRINTABLE, written).replace(PILE, "$1…");
  if (given.length <= most) return cut;
  return given.length <= ODD ? `${cut}…` : `${cut}… (${count(given.length)} characters)`;
}

/** The first line of `plain`. */
export function oneLine(text, most = 400) {
  const first = String(text ?? "").trim().split("\n", 1)[0];
  return plain(first, most).replaceAll("\t", " ");
}

function written(character) {
  const code = character.codePointAt(0).toString(16);
  return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
}

/** `1,234`. */
export function count(number) {
  return Math.round(number).toLocaleString("en-US");
}

/** `1 node`, `2 nodes`. */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** `8 workers` or, of a sharded model, `2 replicas of 4 workers`. */
export function workerCount(size, replica) {
  if (!(replica > 1)) return counted(size, "worker");
  return `${counted(Math.floor(size / replica), "replica")} of ${counted(replica, "worker")}`;
}

/** `12 ms`, `0.18 s`, `3.1 s`, `34 s`, `3 min 20 s`: as exact as is useful. */
export function seconds(duration) {
  if (duration === null || duration === undefined) return "–";
  const given = Math.max(0, duration);
  if (given < 0.0995) return `${Math.round(given * 1000)} ms`;
  if (given < 0.995) return `${given.toFixed(2)} s`;
  if (given < 9.95) return `${given.toFixed(1)} s`;
  return span(Math.round(given)); // parts shown next to their sum have to add up
}

/** Two units at most: `3 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`. */
export function span(duration) {
  const given = Math.max(0, Math.floor(duration));
  if (given < MINUTE) return `${given} s`;
  if (given < HOUR) return units(given, MINUTE, "min", 1, "s");
  if (given < DAY) return units(given, HOUR, "h", MINUTE, "min");
  return units(given, DAY, "d", HOUR, "h");
}

function units(given, big, bigName, small, smallName) {
  const rest = Math.floor((given % big) / small);
  return `${Math.floor(given / big)} ${bigName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** `just now`, `3 min ago`. */
export function ago(wall, now) {
  const passed = now - wall;
  if (passed < 2) return "just now";
  const minutes = passed >= MINUTE && passed < HOUR ? passed - (passed % MINUTE) : passed;
  return `${span(minutes)} ago`;
}

/** `14:02:11`, with the date where it is not the day of `now`. */
export function clock(wall, now) {
  const then = new Date(wall * 1000);
  const time = [then.getHours(), then.getMinutes(), then.getSeconds()].map(two).join(":");
  return date(wall) === date(now) ? time : `${date(wall)} ${time}`;
}

/** `2026-11-16`. */
export function date(wall) {
  const then = new Date(wall * 1000);
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())}`;
}

/** `14:02`. */
export function hours(wall) {
  const then = new Date(wall * 1000);
  return `${two(then.getHours())}:${two(then.getMinutes())}`;
}

function two(number) {
  return String(number).padStart(2, "0");
}

/** `12.5 steps/s`, or `8.2 s per step` where steps are long. */
export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "–";
  if (perSecond > 0 && perSecond < 0.5) return `${seconds(1 / perSecond)} per step`;
  return `${number(perSecond)} steps/s`;
}

/** Three significant digits: `0.00123`, `12.3`, `1,230`, `1.2e-7`. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(1);
  if (size >= 1000) return count(value);
  return String(Number(value.toPrecision(3)));
}

/** `93.1%`. */
export function percent(ratio) {
  return ratio === null || ratio === undefined ? "–" : `${(ratio * 100).toFixed(1)}%`;
}

/** `0–3, 8, 10–11`: ranks, in order. */
export function ranges(numbers, most = 8) {
  const runs = [];
  for (const one of numbers) {
    if (runs.length && one === runs.at(-1)[1] + 1) runs.at(-1)[1] = one;
    else runs.push([one, one]);
  }
  const shown = runs.slice(0, most).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return shown.join(", ") + (runs.length > most ? " …" : "");
}
