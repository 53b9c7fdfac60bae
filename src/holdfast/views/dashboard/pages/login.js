// Exchanges the token for the secret of a session, which only this tab has.
import { keepSecret } from "./session.js";

const form = document.getElementById("form");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  const response = await fetch("/login", { method: "POST", body: new URLSearchParams(new FormData(form)) }).catch(() => null);
  const answer = await response?.json();
  if (response?.ok) {
    keepSecret(answer.secret);
    return location.replace(`/${location.hash}`);
  }
  problem.textContent = response ? answer.problem : "The dashboard does not respond.";
  document.getElementById("token").select();
});
