// The session of this tab: its secret, and requests to the server. The secret comes with the login. The
// browser keeps it for this tab and this origin, port included, and never sends it by itself.

const KEY = "holdfast-session";

// What the server says about the dashboard.
export const session = { readOnly: true, version: "", stages: {}, ending: [], starting: [] };

export function keepSecret(secret) {
  sessionStorage.setItem(KEY, secret);
}

// The login page returns to the view in the address.
export function leave() {
  sessionStorage.removeItem(KEY);
  location.replace(`/login${location.hash}`);
}

// Returns the response, unless the session is over: then it leaves the page.
export async function request(path, options = {}) {
  const secret = sessionStorage.getItem(KEY);
  const response = secret ? await fetch(path, { ...options, headers: { ...options.headers, "x-holdfast-session": secret } }) : null;
  if (response && response.status !== 401) return response;
  leave();
  throw new Error("log in first");
}

export async function post(path, body) {
  const response = await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const value = response.status === 204 ? {} : await response.json();
  if (!response.ok) throw new Error(value.problem || `the server responded with ${response.status}`);
  return value;
}

// Yields the lines of a stream, parsed.
export async function* lines(path, signal) {
  const response = await request(path, { signal });
  if (!response.ok) throw new Error((await response.json()).problem);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}
