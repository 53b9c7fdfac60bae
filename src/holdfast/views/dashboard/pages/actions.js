// Requests to the job. A dialog explains each and takes a reason.
import { h, toast } from "./dom.js";
import { post } from "./session.js";

const TEXTS = {
  restart: ["Restart the workers", "All workers stop within their grace period and start again as the next generation. No restart is charged.", "Restart"],
  stop: ["Stop the job", "The job ends on all nodes. This is final. Its agents exit with code 143.", "Stop the job"],
  drain: ["Drain a node", "Its workers stop within their grace period. It gets no workers until it is undrained. A standby replaces it, or the job continues with fewer nodes. No restart is charged.", "Drain"],
  undrain: ["Undrain a node", "The node is eligible again.", "Undrain"],
};

export function ask(action, node = "") {
  const [title, meaning, verb] = TEXTS[action];
  const dialog = document.getElementById("dialog");
  const reason = h("input", { id: "reason", maxlength: 200, placeholder: "for the consoles of all nodes", autocomplete: "off" });
  const grace = h("input", { id: "grace", type: "number", min: 0, step: "any", placeholder: "the job's own" });
  const problem = h("p", { class: "problem", role: "alert" });
  const confirm = h("button", { type: "submit", class: action === "stop" ? "primary danger" : "primary" }, verb);
  // The id makes a repeated request harmless.
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (one) => one.toString(16).padStart(2, "0")).join("");
  const form = h("form", { method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    confirm.disabled = true;
    problem.textContent = "";
    try {
      const response = await post("/action", { id, action, node, reason: reason.value, grace_s: grace.value === "" ? -1 : Number(grace.value) });
      dialog.close();
      toast(response.why || `${verb.toLowerCase()}${node ? ` ${node}` : ""}: accepted`);
    } catch (error) {
      problem.textContent = error.message;
      confirm.disabled = false;
    }
  } },
    h("h2", { id: "dialog-title" }, title),
    node ? h("p", {}, h("code", {}, node)) : null,
    h("p", { class: "about" }, meaning),
    h("label", { for: "reason" }, "Reason"), reason,
    action === "stop" ? h("label", { for: "grace" }, "Grace period in seconds") : null, action === "stop" ? grace : null,
    problem,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), confirm));
  dialog.replaceChildren(form);
  dialog.showModal();
  reason.focus();
}

export function showKeys() {
  const keys = [["1 … 6", "views"], ["/", "search the logs"], ["← → ↑ ↓", "move over ranks; move along the timeline"], ["Enter", "the logs of the chosen rank"], ["+ − 0", "zoom the timeline"], ["Esc", "close a dialog"], ["?", "this list"]];
  const dialog = document.getElementById("dialog");
  dialog.replaceChildren(h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, "Keys"),
    h("dl", { class: "facts" }, ...keys.flatMap(([key, meaning]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)])),
    h("div", { class: "buttons" }, h("button", { class: "primary" }, "Close"))));
  dialog.showModal();
}
