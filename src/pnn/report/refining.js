// The slider, the switches and the pointed cell of every grid on the page, also of those that come later.
(() => {
  const chosen = new Map(); // what a person set, by the grid's heading: a new text keeps it
  const cellsOf = (grid) => [...grid.querySelectorAll("tbody tr")].map((row) => [...row.cells].slice(1));

  function show(grid) {
    const slider = grid.querySelector("input[type=range]"), step = +slider.value, trained = +slider.dataset.trained;
    grid.classList.toggle("gates", !!grid.querySelector(".show-gates")?.checked);
    grid.classList.toggle("masks", grid.querySelector(".only-masked").checked);
    grid.querySelector("output").textContent = `${step}${step > trained ? ` (${step - trained} untrained)` : ""}`;
    grid.querySelectorAll("thead th").forEach((head, at) => head.classList.toggle("later", at - 1 > step));
    const words = [...grid.querySelectorAll(".reading mark")];
    for (const row of grid.querySelectorAll("tbody tr")) {
      [...row.cells].slice(1).forEach((cell, at) => {
        cell.classList.toggle("later", at > step);
        cell.classList.toggle("read", at === step);
      });
      if (!row.classList.contains("masked")) continue;
      const mark = words.shift(), cell = row.cells[step + 1];
      mark.textContent = cell.querySelector("span").firstChild.textContent;
      mark.style.cssText = cell.style.cssText;
    }
  }

  function point(cell) {
    const grid = cell.closest(".pointable"), name = document.createElement("b");
    const column = grid.querySelector("thead").rows[0].cells[cell.cellIndex];
    grid.querySelector(".pointed")?.classList.remove("pointed");
    cell.classList.add("pointed");
    name.textContent = `${cell.parentElement.cells[0].textContent}, ${column.dataset.name}: `;
    grid.querySelector(".detail").replaceChildren(name, cell.dataset.told);
  }

  function restore(root) {
    for (const grid of root.querySelectorAll(".refining")) {
      const before = chosen.get(grid.querySelector(".name")?.textContent);
      if (before) {
        grid.querySelector("input[type=range]").value = before.step;
        grid.querySelector(".only-masked").checked = before.masks;
        const gates = grid.querySelector(".show-gates");
        if (gates) gates.checked = before.gates;
      }
      show(grid);
    }
  }

  document.addEventListener("input", (event) => {
    const grid = event.target.closest?.(".refining");
    if (!grid) return;
    const [step, masks, gates] = ["input[type=range]", ".only-masked", ".show-gates"].map((one) => grid.querySelector(one));
    chosen.set(grid.querySelector(".name")?.textContent, { step: step.value, masks: masks.checked, gates: !!gates?.checked });
    show(grid);
  });
  for (const kind of ["mouseover", "click"]) {
    document.addEventListener(kind, (event) => {
      const cell = event.target.closest?.(".pointable td");
      if (cell) point(cell);
    });
  }
  document.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const grid = event.target.matches?.(".pointable .scroll") && event.target.closest(".pointable");
    if (!move || !grid) return;
    event.preventDefault();
    const shown = cellsOf(grid).map((row) => row.filter((cell) => cell.offsetParent && !cell.classList.contains("later")));
    const rows = shown.filter((row) => row.length);
    const at = rows.findIndex((row) => row.includes(grid.querySelector(".pointed")));
    const row = rows[at < 0 ? 0 : Math.min(Math.max(at + move[0], 0), rows.length - 1)];
    const column = at < 0 ? 0 : rows[at].indexOf(grid.querySelector(".pointed")) + move[1];
    const cell = row[Math.min(Math.max(column, 0), row.length - 1)];
    point(cell);
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  window.pnnRefining = { restore };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => restore(document));
  else restore(document);
})();
