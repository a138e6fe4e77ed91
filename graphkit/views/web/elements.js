// Elements of the page, and the few texts that depend on what the reader chose.
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

// A text with places where a line may break: behind the dots and underscores of names.
const breakable = (text) => text.split(/(?<=[._/,]|::)/).flatMap((part, at) =>
  at ? [make("wbr"), part] : [part]);

function shareBar(share) {
  const bar = make("span");
  bar.style.width = `${100 * share}%`;
  return make("span", { class: "share", "aria-hidden": "true" }, bar);
}

const list = (pairs) => pairs.flatMap(([name, fact]) =>
  [make("dt", {}, name), make("dd", {}, ...[fact].flat())]);

const us = (time) => time === null ? "-" : time.toLocaleString("en",
  { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const clamped = (value, least, most) => Math.min(Math.max(value, least), most);
