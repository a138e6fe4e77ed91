// The list of nodes: search, order, and the row of the open node.
const STEP = 300;
const state = { graphs: [], found: [], shown: STEP, sort: null, isDown: false, open: null,
  opener: null, kernel: null };

// The file and the line of a source, without the folder and the function.
function shortSource(source) {
  const found = source.match(/[^/\\]+\.py:\d+/);
  return found ? found[0] : source;
}

const COLUMNS = [
  { head: "graph", of: (node) => node.graph.title },
  { head: "#", of: (node) => node.index, isNumber: true },
  { head: "node", of: (node) => node.short_name },
  { head: "us", of: (node) => node.duration_us, show: us, isNumber: true },
  { head: "source", of: (node) => node.source || "", show: shortSource },
  { head: "module", of: (node) => node.path },
  { head: "op", of: (node) => node.op || "" },
  { head: "grid", of: (node) => (node.grid || []).reduce((a, b) => a * b, 1),
    show: (_, node) => extent(node.grid) },
  { head: "block", of: (node) => (node.block || []).reduce((a, b) => a * b, 1),
    show: (_, node) => extent(node.block) },
  { head: "kind", of: (node) => node.kind },
];

function haystack(node) {
  if (node.haystack === undefined) {
    const said = (node.arguments || []).flatMap((argument) =>
      [argument.name, argument.text, ...(argument.pointers || []).map((p) => p.name)]);
    node.haystack = [node.name, node.short_name, node.kind, node.path, node.op, node.source,
      node.scope, extent(node.grid), node.graph.title, ...said].join(" ").toLowerCase();
  }
  return node.haystack;
}

function compare(column) {
  return (a, b) => {
    const [x, y] = [column.of(a), column.of(b)];
    if (x === y) return 0;
    if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return state.isDown ? -order : order;
  };
}

const keyOf = (node) => `${node.kind} ${node.short_name}`;

function find() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  state.found = state.graphs.flatMap((graph) => graph.nodes)
    .filter((node) => !state.kernel || keyOf(node) === state.kernel.key)
    .filter((node) => words.every((word) => haystack(node).includes(word)));
  if (state.sort) state.found.sort(compare(state.sort));
  state.shown = STEP;
  showTable();
  dimBars(new Set(state.found));
}

function showTable() {
  const columns = COLUMNS.slice(state.graphs.length > 1 ? 0 : 1);
  $("nodes").tHead.replaceChildren(make("tr", {}, ...columns.map(headCell)));
  const rows = state.found.slice(0, state.shown).map((node) => bodyRow(node, columns));
  $("nodes").tBodies[0].replaceChildren(...rows);
  const chosen = state.kernel ? ` of ${state.kernel.name}` : "";
  $("count").textContent = sumOf(state.found) + chosen;
  $("more").hidden = state.found.length <= state.shown;
}

// As in the status of the screen. Times of several graphs have no sum.
function sumOf(nodes) {
  const count = counted(nodes.length, "node");
  const time = state.graphs.length === 1 ? timeOf(nodes) : undefined;
  if (!isNumber(time)) return count;
  const whole = state.graphs[0].us;
  return `${count}, ${us(time)} us${whole > 0 ? `, ${percent(time / whole)}` : ""}`;
}

function headCell(column) {
  const order = state.isDown ? "descending" : "ascending";
  const sort = () => {
    state.isDown = state.sort === column ? !state.isDown : column.head === "us";
    state.sort = column;
    find();
    [...$("nodes").tHead.querySelectorAll("button")]
      .find((button) => button.textContent === column.head).focus();
  };
  return make("th", {
    scope: "col", class: column.isNumber ? "number" : "",
    "aria-sort": state.sort === column ? order : undefined,
  }, make("button", { type: "button", onclick: sort }, column.head));
}

function bodyRow(node, columns) {
  return make("tr", { onclick: () => showNode(node), "data-open": state.open === node },
    ...columns.map((column) => {
      const value = column.of(node);
      const text = column.show ? column.show(value, node) : String(value);
      return make("td", { class: column.isNumber ? "number" : "" },
        column.head !== "node" ? text
          : make("button", { type: "button", title: node.name }, ...breakable(text)));
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
