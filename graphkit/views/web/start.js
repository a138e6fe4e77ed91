// The start of the page.
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
  $("loading").remove();
  startReplay();
  choose();
}

// The table of all nodes, which browsers without JavaScript show, too.
function showPlainTable(reason) {
  const plain = new DOMParser().parseFromString($("table").textContent, "text/html");
  $("failure").textContent = `${reason} This is the table of its nodes alone.`;
  $("failure").hidden = false;
  $("loading").remove();
  document.body.append(...plain.body.childNodes);
}

if (typeof DecompressionStream === "undefined") {
  showPlainTable("This browser cannot decompress the record: it has no DecompressionStream. " +
    "A newer one shows the tree, the charts and the search.");
} else {
  load().then(start, (error) => showPlainTable(`The record cannot be unpacked: ${error.message}.`));
}
