// The table of sizes, and the start of the page.
function showSizes() {
  const rows = (page.record.modes || []).flatMap((mode) => mode.sizes.map((each) => [mode.mode,
    each.batch_size, each.num_nodes, size(each.pool_bytes), us(each.capture_ms),
    us(each.replay_us), us(each.eager_us)]));
  if (!rows.length) return;
  const heads = ["mode", "size", "nodes", "pool", "capture ms", "replay us", "eager us"];
  const cells = (tag, row, facts) => make("tr", {}, ...row.map((text, place) =>
    make(tag, { class: place ? "number" : "", ...facts }, String(text))));
  $("sizes").append(make("details", {}, make("summary", {}, `captured sizes: ${rows.length}`),
    make("div", { class: "wide" }, make("table", {},
      make("thead", {}, cells("th", heads, { scope: "col" })),
      make("tbody", {}, ...rows.map((row) => cells("td", row)))))));
}

function choose() {
  const chosen = $("graph").value;
  state.graphs = chosen === "all" ? page.graphs : [page.graphs[Number(chosen)]];
  $("charts").hidden = state.graphs.length !== 1;
  if (state.graphs.length === 1) {
    showReplay(state.graphs[0]);
    showIcicle(state.graphs[0]);
  }
  showTree();
  showKernels();
  find();
}

function start() {
  const { graphs } = page;
  if (graphs.length !== 1) $("graph").append(make("option", { value: "all" }, "all graphs"));
  graphs.forEach((graph, at) => $("graph").append(make("option", { value: at }, graph.title)));
  if (graphs.length) $("graph").value = $("graph").dataset.first;
  $("graph").addEventListener("change", choose);
  $("search").addEventListener("input", find);
  $("all").addEventListener("click", () => { chooseKernel(null); $("search").focus(); });
  $("more").addEventListener("click", () => { state.shown += STEP; showTable(); });
  $("save").addEventListener("click", save);
  $("icicle").addEventListener("keydown", pressIcicle);
  $("page").hidden = false;
  startReplay();
  showSizes();
  choose();
}

// The table of all nodes, which browsers without JavaScript show, too.
function showPlainTable() {
  const plain = new DOMParser().parseFromString($("table").textContent, "text/html");
  $("failure").textContent = "This browser cannot decompress the record: it has no " +
    "DecompressionStream. A newer one shows the tree, the charts and the search.";
  $("failure").hidden = false;
  document.body.append(...plain.body.childNodes);
}

if (typeof DecompressionStream === "undefined") showPlainTable();
else load().then(start);
