// Stacks of all workers, equal ones grouped.
import { h, ranges } from "./dom.js";
import { post } from "./session.js";

export function stacks(element) {
  let isBusy = false;
  let current = null;
  const status = h("p", { class: "about", role: "status" }, "Reading a stack pauses the worker for a moment.");
  const take = h("button", { type: "button", class: "primary", onclick: () => dump() }, "Take stacks");
  const groups = h("div", { id: "stack-groups" });
  element.append(h("section", {}, h("h2", {}, "Stacks"), h("div", { class: "controls" }, take), status, groups));

  async function dump() {
    isBusy = true;
    render(current);
    status.textContent = "requesting stacks from all nodes …";
    try {
      const found = await post("/stacks", {});
      const count = found.groups.reduce((sum, one) => sum + one.ranks.length, 0);
      status.textContent = `${count} ranks in ${found.groups.length} ${found.groups.length === 1 ? "group" : "groups"}, at ${new Date().toTimeString().slice(0, 8)}`;
      groups.replaceChildren(
        ...found.problems.map((problem) => h("p", { class: "problem" }, problem)),
        ...found.groups.map((one, at) => h("details", at === 0 ? { open: true } : {},
          h("summary", {}, h("strong", {}, one.ranks.length === 1 ? `rank ${one.ranks[0]}` : `${one.ranks.length} ranks`), " ", h("span", { class: "dim" }, one.ranks.length === 1 ? "" : ranges(one.ranks)), " ", one.frame),
          h("div", {}, h("pre", { tabindex: 0 }, one.text)))));
    } catch (error) {
      status.textContent = error.message;
    }
    isBusy = false;
    render(current);
  }

  function render(state) {
    current = state;
    take.hidden = Boolean(state.job.end);
    take.disabled = isBusy || state.isLost;
  }

  return { render };
}
