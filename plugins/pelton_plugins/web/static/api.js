// Requests to this server, with the key where it wants one. The key is in memory and nowhere else.

let key = "";
let asking = null;

const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");

const said = document.getElementById("key-text");
const WANTED = said.textContent;

/** Asks for the key; resolves to false when the person does not give one. */
export function askForKey(isWrong = false) {
  asking ??= new Promise((resolve) => {
    field.value = "";
    said.textContent = isWrong ? `The server does not take that key. ${WANTED}` : WANTED;
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => {
        const isGiven = dialog.returnValue === "given";
        if (isGiven) key = field.value.trim();
        field.value = "";
        asking = null;
        resolve(isGiven);
      },
      { once: true },
    );
  });
  return asking;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close(""));

/** What went wrong, in the server's words. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function failure(answer) {
  let message = `The server answers with status ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not JSON: the status says it
  }
  return new ServerError(answer.status, message);
}

/** Fetches a path of this server. isQuiet: no dialog where the key is missing. Throws `ServerError`. */
export async function ask(path, { isQuiet = false, ...options } = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    if (answer.status !== 401 || isQuiet || !(await askForKey("authorization" in headers))) throw await failure(answer);
  }
}
