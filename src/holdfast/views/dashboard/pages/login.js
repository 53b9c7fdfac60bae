// Exchanges the token for a session's cookie, which scripts cannot read.
const form = document.getElementById("form");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  const response = await fetch("/login", { method: "POST", body: new URLSearchParams(new FormData(form)) }).catch(() => null);
  if (response?.ok) return location.replace("/");
  problem.textContent = response ? (await response.json()).problem : "The dashboard does not respond.";
  document.getElementById("token").select();
});
