// Elements, and numbers as text.
const $ = (id) => document.getElementById(id);

function make(tag, facts = {}, ...children) {
  return filled(document.createElement(tag), facts, children);
}

// In the namespace of the page's own picture.
function draw(tag, facts = {}, ...children) {
  return filled(document.createElementNS($("bars").namespaceURI, tag), facts, children);
}

function filled(made, facts, children) {
  for (const [name, value] of Object.entries(facts)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== ""));
  return made;
}

// A field that the record leaves out has its default: no module, no arguments, not measured.
const extent = (shape) => (shape || []).join("x");
const isNumber = (value) => typeof value === "number";
const us = (value) => isNumber(value)
  ? value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : "-";
const percent = (share) => isNumber(share) ? `${(100 * share).toFixed(1)}%` : "-";
// A text with places where a line may break: behind the dots and underscores of names.
const breakable = (text) => text.split(/(?<=[._/,]|::)/).flatMap((part, at) =>
  at ? [make("wbr"), part] : [part]);
const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
const clamped = (value, least, most) => Math.min(Math.max(value, least), most);
const hex = (address) => "0x" + BigInt(address).toString(16);

function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let at = 0;
  for (; bytes >= 1024 && at < 3; at++) bytes /= 1024;
  return `${bytes.toFixed(at ? 1 : 0)} ${units[at]}`;
}

function list(pairs) {
  return pairs.filter(([, fact]) => fact !== undefined && fact !== null && fact !== "")
    .flatMap(([name, fact]) => [make("dt", {}, name), make("dd", {}, ...[fact].flat())]);
}
