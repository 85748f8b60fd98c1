// Puts the page together: model names, health, chat and figures.

import { ask, askForKey } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const HEALTH_MS = 5000;
const model = document.getElementById("model");
const health = document.getElementById("health");

async function loadModels(options) {
  try {
    const { data } = await (await ask("v1/models", options)).json();
    model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    return true;
  } catch {
    return false; // the health line says why, or the key is missing
  }
}

function say(text, state) {
  if (health.textContent !== text) health.textContent = text; // else it would be read out again
  health.className = `health ${state}`;
}

async function look() {
  if (document.hidden) return;
  try {
    await ask("health", { isQuiet: true });
    say("ready", "up");
    if (!model.options.length) await loadModels({ isQuiet: true });
  } catch (error) {
    say(error.status ? error.message : "The server does not answer.", "down");
  }
}

const live = new Live();
document.getElementById("open-key").addEventListener("click", async () => {
  if (await askForKey()) {
    await loadModels();
    live.look();
  }
});
new Chat(() => model.value || undefined);
document.getElementById("prompt").focus();
if (await loadModels()) live.look();
await look();
setInterval(look, HEALTH_MS);
