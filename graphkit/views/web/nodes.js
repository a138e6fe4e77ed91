// The tables of kernels and nodes: a kernel or words select nodes, a heading sorts them.
const STEP = 300;
const COLUMNS = ["graph", "#", "node", "us", "source", "module", "op", "grid", "block", "kind"];
const NUMBERS = ["#", "us"];
const nodeCells = (node) => [node.graph.title, node.index, node.name, us(node.us), node.source,
  node.module, node.op, node.grid, node.block, node.kind];

function showKernels() {
  $("kernels-note").hidden = !state.graphs.some(({ kernels }) => kernels.heads.includes("GB/s"));
  $("kernels").replaceChildren(...state.graphs.map(kernelTable));
  markKernel();
}

// Shows the nodes of one kernel alone, or all nodes if it is chosen already.
function chooseKernel(kernel) {
  state.kernel = kernel === state.kernel ? null : kernel;
  markKernel();
  find();
}

function markKernel() {
  for (const kernel of state.graphs.flatMap((graph) => graph.kernels.rows)) {
    kernel.button.setAttribute("aria-pressed", kernel === state.kernel);
    kernel.row.toggleAttribute("data-open", kernel === state.kernel);
  }
  $("all").hidden = state.kernel === null;
}

function kernelTable({ title, kernels: { heads, rows } }) {
  const isNumber = (at) => at > 0 && at < heads.length - 1 && heads[at] !== "grid";
  return make("table", {},
    state.graphs.length > 1 ? make("caption", {}, title) : "",
    make("thead", {}, make("tr", {}, ...heads.map((head, at) =>
      make("th", { scope: "col", class: isNumber(at) ? "number" : "" }, head)))),
    make("tbody", {}, ...rows.map((kernel) => kernelRow(kernel, heads, isNumber))));
}

function kernelRow(kernel, heads, isNumber) {
  const [name, ...numbers] = kernel.cells;
  kernel.button = make("button", { type: "button", title: kernel.note,
    onclick: () => chooseKernel(kernel) }, ...breakable(name));
  kernel.row = make("tr", {}, make("td", {}, kernel.button),
    ...numbers.map((text, at) => make("td", { class: isNumber(at + 1) ? "number" : "",
      title: kernel.note }, heads[at + 1] === "share" ? shareBar(kernel.share) : "", text)),
    make("td", { class: "modules" }, moduleNames(kernel)));
  return kernel.row;
}

function moduleNames({ modules }) {
  const names = make("span", {}, ...breakable(modules.join(", ")));
  return modules.length === 1 ? names : make("details", {},
    make("summary", {}, ...breakable(modules[0]), ` and\u00a0${modules.length - 1}\u00a0more`), names);
}

// All words must occur in what the table or the details of a node say.
function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const hasWords = (node) => {
    const text = `${nodeCells(node).join(" ").toLowerCase()} ${node.words}`;
    return words.every((word) => text.includes(word));
  };
  state.found = state.graphs.flatMap((graph) => graph.nodes)
    .filter((node) => (!state.kernel || state.kernel.nodes.has(node)) && hasWords(node));
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
  const skipped = state.graphs.length > 1 ? 0 : 1;
  $("nodes").tHead.replaceChildren(make("tr", {}, ...COLUMNS.slice(skipped).map(headCell)));
  const rows = state.found.slice(0, state.shown).map((node) => bodyRow(node, skipped));
  $("nodes").tBodies[0].replaceChildren(...rows);
  const chosen = state.kernel ? ` of ${state.kernel.cells[0]}` : "";
  $("count").textContent = sumText(state.found) + chosen;
  $("more").hidden = state.found.length <= state.shown;
}

// As in the status of the screen. Times of several graphs have no sum.
function sumText(nodes) {
  const count = `${nodes.length.toLocaleString("en")} node${nodes.length === 1 ? "" : "s"}`;
  const time = state.graphs.length === 1 ? totalTime(nodes) : null;
  if (time === null) return count;
  const whole = state.graphs[0].us;
  return `${count}, ${us(time)} us${whole > 0 ? `, ${(100 * time / whole).toFixed(1)}%` : ""}`;
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
  return make("th", {
    scope: "col", class: NUMBERS.includes(column) ? "number" : "",
    "aria-sort": state.sort === column ? order : undefined,
  }, make("button", { type: "button", onclick: sort }, column));
}

function bodyRow(node, skipped) {
  return make("tr", { onclick: () => showNode(node), "data-open": state.open === node },
    ...nodeCells(node).slice(skipped).map((text, at) => {
      const column = COLUMNS[at + skipped];
      return make("td", { class: NUMBERS.includes(column) ? "number" : "" },
        column === "node" ? make("button", { type: "button" }, ...breakable(text)) : text);
    }));
}

// Marks the row of the open node. A search that hides the row ends.
function markRow(node) {
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
  if (place < 0) return;
  const row = body.rows[place];
  row.dataset.open = "";
  const [view, head] = [$("list"), $("nodes").tHead.offsetHeight];
  if (row.offsetTop < view.scrollTop + head) view.scrollTop = row.offsetTop - head;
  const below = row.offsetTop + row.offsetHeight - view.clientHeight;
  if (below > view.scrollTop) view.scrollTop = below;
}
