// Elements, and the tables: modules, kernels, nodes, and the details of one node.
const STEP = 300;
const COLUMNS = ["#", "node", "us", "source", "module", "op", "grid"];
const MINOR = ["mean us", "grid", "bytes, at most", "GB/s", "modules", "module", "op"];
const state = { graph: null, kernel: null, found: [], shown: STEP, sort: null, isDown: false,
  open: null, opener: null };

const $ = (id) => document.getElementById(id);
const make = (tag, facts, ...children) => filled(document.createElement(tag), facts, children);
// In the namespace of the page's own picture.
const draw = (tag, facts, ...children) =>
  filled(document.createElementNS($("bars").namespaceURI, tag), facts, children);

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
  at ? [make("wbr", {}), part] : [part]);
const list = (pairs) => pairs.flatMap(([name, fact]) =>
  [make("dt", {}, name), make("dd", {}, ...[fact].flat())]);
const us = (time) => time === null ? "-" : time.toLocaleString("en",
  { minimumFractionDigits: 2, maximumFractionDigits: 2 });

function shareBar(share) {
  const bar = make("span", {});
  bar.style.width = `${100 * share}%`;
  return make("span", { class: "share", "aria-hidden": "true" }, bar);
}

// Columns of numbers are right-aligned; a narrow window leaves out minor ones.
const cellClass = (head, isNumber) =>
  `${isNumber ? "number" : ""} ${MINOR.includes(head) ? "minor" : ""}`.trim();

// Numbers and bars are in columns of their own; a name is indented by its depth.
function treeRow(tag, name, time, share, depth, facts = {}) {
  const made = make(tag, { class: "row", title: name, ...facts },
    make("span", { class: "us" }, time), shareBar(share),
    make("span", { class: "name" }, ...breakable(name)));
  made.style.setProperty("--depth", depth);
  return made;
}

// The rows inside of a module are made when it is opened.
function branch({ name, time, share, isOpen, rows }, depth) {
  const made = make("details", {}, treeRow("summary", name, time, share, depth));
  const entry = (row) => row.rows ? branch(row, depth + 1)
    : treeRow("button", row.name, us(row.us), state.graph.us ? row.us / state.graph.us : 0,
      depth + 1, { type: "button", onclick: () => showNode(row) });
  const fill = () => made.childElementCount === 1 && made.append(...rows.map(entry));
  made.addEventListener("toggle", fill);
  if (isOpen) {
    fill();
    made.open = true;
  }
  return made;
}

function kernelTable({ heads, rows }) {
  const isNumber = (at) => at > 0 && at < heads.length - 1 && heads[at] !== "grid";
  const row = (kernel) => {
    const [name, ...texts] = kernel.cells;
    kernel.button = make("button", { type: "button", title: kernel.note,
      onclick: () => chooseKernel(kernel) }, ...breakable(name));
    kernel.row = make("tr", {}, make("td", {}, kernel.button), ...texts.map((text, at) =>
      make("td", { class: cellClass(heads[at + 1], isNumber(at + 1)), title: kernel.note },
        heads[at + 1] === "share" ? shareBar(kernel.share) : "", text)),
    make("td", { class: "modules minor" }, moduleNames(kernel)));
    return kernel.row;
  };
  return make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head, at) =>
      make("th", { scope: "col", class: cellClass(head, isNumber(at)) }, head)))),
    make("tbody", {}, ...rows.map(row)));
}

function moduleNames({ modules }) {
  const names = make("span", {}, ...breakable(modules.join(", ")));
  return modules.length === 1 ? names : make("details", {},
    make("summary", {}, ...breakable(modules[0]), ` and\u00a0${modules.length - 1}\u00a0more`), names);
}

// Shows the nodes of one kernel alone, or all nodes if it is chosen already.
function chooseKernel(kernel) {
  state.kernel = kernel === state.kernel ? null : kernel;
  for (const one of state.graph.kernels.rows) {
    one.button.setAttribute("aria-pressed", one === state.kernel);
    one.row.toggleAttribute("data-open", one === state.kernel);
  }
  $("all").hidden = state.kernel === null;
  find();
}

const nodeCells = (node) => [node.index, node.name, us(node.us), node.source, node.module, node.op,
  node.grid];

// All words must occur in what the table or the details of a node say.
function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  state.found = state.graph.nodes.filter((node) => (!state.kernel || state.kernel.nodes.has(node)) &&
    words.every((word) => node.words.includes(word)));
  if (state.sort) state.found.sort(compare(state.sort));
  state.shown = STEP;
  showTable();
  dimBars(new Set(state.found));
}

function compare(column) {
  const at = COLUMNS.indexOf(column);
  return (a, b) => {
    if (column === "us" && (a.us === null || b.us === null)) return (a.us === null) - (b.us === null);
    const order = column === "us" ? a.us - b.us
      : nodeCells(a)[at].localeCompare(nodeCells(b)[at], "en", { numeric: true });
    return state.isDown ? -order : order;
  };
}

function showTable() {
  $("nodes").tHead.replaceChildren(make("tr", {}, ...COLUMNS.map(headCell)));
  $("nodes").tBodies[0].replaceChildren(...state.found.slice(0, state.shown).map(bodyRow));
  const chosen = state.kernel ? ` of ${state.kernel.cells[0]}` : "";
  $("count").textContent = sumText(state.found) + chosen;
  $("more").hidden = state.found.length <= state.shown;
}

// As in the status of the screen.
function sumText(nodes) {
  const count = `${nodes.length.toLocaleString("en")} node${nodes.length === 1 ? "" : "s"}`;
  const time = totalTime(nodes);
  if (time === null) return count;
  const whole = state.graph.us;
  return `${count}, ${us(time)} us${whole > 0 ? `, ${(100 * time / whole).toFixed(1)}%` : ""}`;
}

// The time of nodes; one inside of another one that was measured is not counted again.
function totalTime(nodes) {
  const known = new Set(nodes);
  const isInside = ({ holder }) => holder &&
    ((known.has(holder) && holder.us !== null) || isInside(holder));
  const times = nodes.filter((node) => node.us !== null && !isInside(node));
  return times.length ? times.reduce((sum, node) => sum + node.us, 0) : null;
}

function headCell(column) {
  const order = state.isDown ? "descending" : "ascending";
  const sort = () => {
    state.isDown = state.sort === column ? !state.isDown : column === "us";
    state.sort = column;
    find();
    [...$("nodes").tHead.querySelectorAll("button")]
      .find((button) => button.textContent === column).focus();
  };
  return make("th", { scope: "col", class: cellClass(column, ["#", "us"].includes(column)),
    "aria-sort": state.sort === column ? order : undefined,
  }, make("button", { type: "button", onclick: sort }, column));
}

function bodyRow(node) {
  return make("tr", { onclick: () => showNode(node), "data-open": state.open === node },
    ...nodeCells(node).map((text, at) => make("td",
      { class: cellClass(COLUMNS[at], ["#", "us"].includes(COLUMNS[at])) },
      COLUMNS[at] === "node" ? make("button", { type: "button" }, ...breakable(text)) : text)));
}

// The panel of one node.
function showNode(node) {
  if ($("details").hidden) state.opener = document.activeElement;
  const pressed = $("details").contains(document.activeElement) && document.activeElement.textContent;
  const button = (text, onclick) => make("button", { type: "button", class: "plain", onclick }, text);
  const beside = (step) => () => showNode(state.found[state.found.indexOf(node) + step] || node);
  const close = () => {
    $("details").hidden = true;
    mark(null);
    if (state.opener.isConnected) state.opener.focus();
  };
  $("details").replaceChildren(
    make("header", {}, make("h2", {}, `#${node.index} ${node.name}`),
      button("previous", beside(-1)), button("next", beside(1)), button("close", close)),
    make("dl", {}, ...list([...node.facts, ...relatedNodes(node)])),
    ...argumentTable(node.arguments));
  $("details").onkeydown = (event) => event.key === "Escape" && close();
  $("details").hidden = false;
  $("details").scrollTop = 0;
  const buttons = [...$("details").querySelectorAll("header button")];
  (buttons.find((one) => one.textContent === pressed) || buttons.at(-1)).focus();
  mark(node);
}

// Names of relations to other nodes, and buttons that open these.
function relatedNodes(node) {
  const { edges } = state.graph;
  const opens = (other, kind = "") => [make("button", { type: "button",
    onclick: () => showNode(other) }, `#${other.index} ${other.name}${kind}`), make("br", {})];
  const before = edges.filter(({ target }) => target === node);
  const after = edges.filter(({ source }) => source === node);
  return [
    ["inside of", node.holder ? opens(node.holder) : []],
    ["waits for", before.flatMap(({ source, kind }) => opens(source, kind))],
    ["before", after.flatMap(({ target, kind }) => opens(target, kind))],
  ].filter(([, links]) => links.length);
}

function argumentTable(rows) {
  const heads = ["argument", "value", "kind", "offset", "bytes"];
  return rows.length ? [make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((cells) =>
      make("tr", {}, ...cells.map((text) => make("td", {}, text))))))] : [];
}

// Marks a node in every view. A search that hides its row ends.
function mark(node) {
  state.open = node;
  markBar(node);
  markFrames(node);
  const body = $("nodes").tBodies[0];
  for (const row of body.rows) row.removeAttribute("data-open");
  if (!node) return;
  if (!state.found.includes(node)) {
    $("search").value = "";
    chooseKernel(null);
  }
  const place = state.found.indexOf(node);
  if (place >= state.shown) {
    state.shown = place + 1;
    showTable();
  }
  const row = body.rows[place];
  row.dataset.open = "";
  const [view, head] = [$("list"), $("nodes").tHead.offsetHeight];
  if (row.offsetTop < view.scrollTop + head) view.scrollTop = row.offsetTop - head;
  const below = row.offsetTop + row.offsetHeight - view.clientHeight;
  if (below > view.scrollTop) view.scrollTop = below;
}
