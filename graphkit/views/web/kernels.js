// The cost by kernel; a kernel selects its nodes.
function showKernels() {
  $("kernels-note").hidden = !state.graphs.some(({ kernels }) =>
    kernels.some((kernel) => "bytes, at most" in kernel));
  $("kernels").replaceChildren(...state.graphs.map(kernelTable));
  markKernel();
}

// Shows the nodes of one kernel alone, or those of all if it is chosen already.
function chooseKernel(kernel) {
  state.kernel = kernel && state.kernel && kernel.key === state.kernel.key ? null : kernel;
  markKernel();
  find();
}

function markKernel() {
  for (const kernel of state.graphs.flatMap((graph) => graph.kernels)) {
    const isChosen = state.kernel !== null && kernel.key === state.kernel.key;
    kernel.button.setAttribute("aria-pressed", isChosen);
    kernel.row.toggleAttribute("data-open", isChosen);
  }
  $("all").hidden = state.kernel === null;
}

// The columns of numbers, with their text; a record without sizes of tensors has no bytes.
const kernelColumns = {
  nodes: (count) => count.toLocaleString("en"),
  us,
  share: percent,
  "mean us": us,
  "bytes, at most": (bytes) => isNumber(bytes) ? size(bytes) : "unknown",
  "GB/s": (rate) => isNumber(rate) ? rate.toLocaleString("en",
    { minimumFractionDigits: 1, maximumFractionDigits: 1 }) : "-",
};

function kernelTable(graph) {
  const numbers = Object.keys(kernelColumns).filter((name) =>
    graph.kernels.some((kernel) => name in kernel));
  const heads = ["kernel", ...numbers, "modules"];
  return make("table", {},
    state.graphs.length > 1 ? make("caption", {}, graph.title) : "",
    make("thead", {}, make("tr", {}, ...heads.map((head) =>
      make("th", { scope: "col", class: numbers.includes(head) ? "number" : "" }, head)))),
    make("tbody", {}, ...graph.kernels.map((kernel) => kernelRow(kernel, numbers))));
}

function kernelRow(kernel, numbers) {
  const number = (name) => make("td", { class: "number",
    title: isNumber(kernel[name]) ? undefined : kernel.note },
    name === "share" ? shareBar(kernel.share) : "", kernelColumns[name](kernel[name]));
  kernel.button = make("button", { type: "button", title: kernel.note,
    onclick: () => chooseKernel(kernel) }, ...breakable(kernel.name));
  kernel.row = make("tr", {}, make("td", {}, kernel.button),
    ...numbers.map(number),
    make("td", { class: "modules" }, modulesOf(kernel)));
  return kernel.row;
}

function modulesOf({ modules }) {
  const names = make("span", {}, ...breakable(modules.join(", ")));
  return modules.length === 1 ? names : make("details", {},
    make("summary", {}, ...breakable(modules[0]), ` and\u00a0${modules.length - 1}\u00a0more`), names);
}
