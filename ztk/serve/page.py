"""The page on `/`: try a prompt and inspect the probability of each token."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>ztk</title>
<style>
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.1rem; } textarea { width: 100%; box-sizing: border-box; font: 14px/1.5 ui-monospace, monospace; }
form div { display: flex; flex-wrap: wrap; gap: 1rem; align-items: center; margin: .6rem 0; } input { width: 6rem; }
#answer { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.7 ui-monospace, monospace; border: 1px solid var(--line);
  border-radius: .4rem; min-height: 6rem; padding: .8rem; } #status { color: #888; } .error { color: #c33; }
</style></head><body>
<h1 id="model">ztk</h1>
<form><textarea id="prompt" rows="6" autofocus>def main():</textarea>
<div><label>tokens <input id="max_tokens" type="number" min="1" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" step="0.1" value="0.8"></label>
<label>key <input id="key" type="password" placeholder="if asked for"></label>
<button id="go">Generate</button><button id="stop" type="button" disabled>Stop</button><span id="status"></span></div></form>
<div id="answer" aria-live="polite"></div>
<p>The redder a token, the less likely it was; point at it for its probability and its rivals.</p>
<script>
const at = id => document.getElementById(id);
let control = null;
const headers = () => ({"Content-Type": "application/json", ...(at("key").value ? {Authorization: "Bearer " + at("key").value} : {})});
fetch("v1/models", {headers: headers()}).then(r => r.json()).then(m => { if (m.data) at("model").textContent = m.data[0].id; });
function show(choice) {
  if (!choice.text) return;
  const span = document.createElement("span"), p = choice.logprobs ? Math.exp(choice.logprobs.token_logprobs[0]) : 1;
  span.textContent = choice.text;
  span.style.background = `rgba(220, 40, 40, ${(0.6 * (1 - p)).toFixed(3)})`;
  const rivals = choice.logprobs ? Object.entries(choice.logprobs.top_logprobs[0]).sort((a, b) => b[1] - a[1]) : [];
  span.title = [`${(100 * p).toFixed(1)} %`, ...rivals.map(([t, v]) => `${JSON.stringify(t)} ${(100 * Math.exp(v)).toFixed(1)} %`)].join("\\n");
  at("answer").append(span);
}
async function run(event) {
  event.preventDefault();
  at("answer").textContent = ""; at("status").textContent = "..."; at("status").className = "";
  at("go").disabled = true; at("stop").disabled = false; control = new AbortController();
  const started = performance.now(); let count = 0;
  try {
    const body = {prompt: at("prompt").value, max_tokens: +at("max_tokens").value,
      temperature: +at("temperature").value, logprobs: 5, stream: true};
    const response = await fetch("v1/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let buffer = "";;) {
      const {done, value} = await reader.read();
      if (done) break;
      const events = (buffer + value).split("\\n\\n"); buffer = events.pop();
      for (const text of events) {
        if (text === "data: [DONE]") continue;
        const chunk = JSON.parse(text.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        chunk.choices.forEach(choice => { count += 1; show(choice); });
      }
    }
    at("status").textContent = `${count} tokens, ${(1000 * count / (performance.now() - started)).toFixed(1)} per second`;
  } catch (error) {
    at("status").textContent = error.name === "AbortError" ? "stopped" : error.message;
    at("status").className = error.name === "AbortError" ? "" : "error";
  } finally { at("go").disabled = false; at("stop").disabled = true; }
}
document.querySelector("form").addEventListener("submit", run);
at("stop").addEventListener("click", () => control.abort());
</script></body></html>
"""
