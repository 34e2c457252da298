// Descriptions of elements, and the one place that changes the document.
//
// Sections are pure functions from data to a description. `patch` updates an element's children to
// match a description and changes only what differs, so whatever is open, scrolled, focused or
// selected stays that way. Text only goes into text nodes, so it cannot inject markup.

const SVG = "http://www.w3.org/2000/svg";
/** The description that an element was last made from. */
const made = new WeakMap();

/** An element: `h("p", { class: "quiet" }, "text", h("b", null, "more"))`. */
export function h(tag, attributes, ...children) {
  const given = attributes ?? {};
  const inside = children.flat(Infinity).filter(isSomething);
  return { tag, attributes: given, key: given.key, children: inside };
}

/** Update the children of an element to match these descriptions. */
export function patch(parent, wanted) {
  const free = new Free(parent);
  const nodes = joined(wanted).map((one) => free.take(one) ?? create(one, parent));
  // Remove first: then elements that stay need not move, and keep their focus.
  const staying = new Set(nodes);
  for (const child of [...parent.childNodes]) if (!staying.has(child)) child.remove();
  nodes.forEach((node, place) => {
    const there = parent.childNodes[place] ?? null;
    if (there !== node) parent.insertBefore(node, there);
  });
}

function isSomething(child) {
  return child !== null && child !== undefined && child !== false && child !== "";
}

/** Join neighbouring texts into one text node. */
function joined(children) {
  const all = [];
  for (const child of children.flat(Infinity).filter(isSomething)) {
    if (typeof child === "object") all.push(child);
    else if (typeof all.at(-1) === "string") all[all.length - 1] += String(child);
    else all.push(String(child));
  }
  return all;
}

/** The current children of an element, for reuse: by key, or else the next one of the same kind. */
class Free {
  constructor(parent) {
    this.keyed = new Map();
    this.others = new Map();
    for (const child of parent.childNodes) {
      const key = made.get(child)?.key;
      if (key !== undefined) this.keyed.set(key, child);
      else if (this.others.has(kind(child))) this.others.get(kind(child)).push(child);
      else this.others.set(kind(child), [child]);
    }
    // Taken from the end.
    for (const list of this.others.values()) list.reverse();
  }

  take(wanted) {
    if (typeof wanted === "string") return this.text(wanted);
    const found =
      wanted.key === undefined ? this.others.get(wanted.tag)?.pop() : this.keyed.get(wanted.key);
    if (!found || kind(found) !== wanted.tag) return null;
    this.keyed.delete(wanted.key);
    update(found, wanted);
    return found;
  }

  text(wanted) {
    const found = this.others.get("#text")?.pop() ?? null;
    if (found && found.nodeValue !== wanted) found.nodeValue = wanted;
    return found;
  }
}

function kind(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.localName : node.nodeName;
}

function create(wanted, parent) {
  if (typeof wanted === "string") return document.createTextNode(wanted);
  const space = wanted.tag === "svg" ? SVG : parent.namespaceURI;
  const element = document.createElementNS(space, wanted.tag);
  update(element, wanted);
  return element;
}

function update(element, wanted) {
  const before = made.get(element);
  if (before === wanted) return;
  made.set(element, wanted);
  const old = before?.attributes ?? {};
  for (const name of new Set([...Object.keys(old), ...Object.keys(wanted.attributes)])) {
    if (name !== "key") setAttribute(element, name, old[name], wanted.attributes[name]);
  }
  patch(element, wanted.children);
}

function setAttribute(element, name, before, value) {
  if (before === value) return;
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : value);
}
