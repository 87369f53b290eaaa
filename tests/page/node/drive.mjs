// Drives Chromium for tests/page/browser.py: reads one command a line from stdin, as JSON, and answers each with a line.
// Argument: the folder that has playwright-core and axe-core.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [installed] = process.argv.slice(2);
const require = createRequire(`${installed}/package.json`);
const { chromium } = require("playwright-core");
const axe = require("axe-core");

const WAIT_MS = 120_000; // for failures only: a page that has lost its router tries again after up to 19 s
let browser, context, page;
let problems = []; // what no page of ours may do
let foreign = [];

const commands = {
  // Opens a new, empty profile of the browser.
  async launch({ executable }) {
    const off = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
    browser = await chromium.launch({ executablePath: executable, headless: true, args: ["--no-sandbox", "--no-first-run", ...off] });
  },
  // Opens an address in a tab of its own, with nothing kept of those before it.
  async open({ url, key, look = {} }) {
    await context?.close();
    context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce", ...look });
    context.setDefaultTimeout(WAIT_MS);
    page = await context.newPage();
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) problems.push(`console: ${message.text()}`);
    });
    page.on("pageerror", (error) => problems.push(`exception: ${error.stack ?? error}`));
    const origin = new URL(url).origin;
    context.on("request", (request) => {
      if (new URL(request.url()).origin !== origin) foreign.push(request.url());
    });
    if (key) await page.addInitScript((given) => sessionStorage.setItem("trunkline.api-key", given), key);
    await page.goto(url);
  },
  // Closes the tab.
  async close() {
    await context?.close();
    context = undefined;
  },
  // What was wrong since the last call.
  problems() {
    const told = { problems, foreign };
    [problems, foreign] = [[], []];
    return told;
  },
  click: ({ selector }) => page.locator(selector).first().click(),
  fill: ({ selector, text }) => page.locator(selector).fill(text),
  choose: ({ selector, value }) => page.locator(selector).selectOption(value),
  press: ({ key }) => page.keyboard.press(key),
  focus: ({ selector }) => page.locator(selector).first().focus(),
  // Waits until an element is there, with this text in it.
  wait: ({ selector, text }) => page.locator(selector, text ? { hasText: new RegExp(text, "s") } : {}).first().waitFor(),
  gone: ({ selector }) => page.locator(selector).first().waitFor({ state: "hidden" }),
  text: ({ selector }) => page.locator(selector).first().innerText(),
  count: ({ selector }) => page.locator(selector).count(),
  is_visible: ({ selector }) => page.locator(selector).first().isVisible(),
  // The text of the whole document, hidden or not.
  everything: () => page.evaluate(() => document.documentElement.outerHTML),
  // The value of a function body that runs in the page.
  value: ({ body }) => page.evaluate(new Function(`return (async () => { ${body} })()`)),
  screenshot: ({ path, selector, full }) =>
    selector ? page.locator(selector).screenshot({ path }) : page.screenshot({ path, fullPage: full === true }),
  // Rules of accessibility that the page breaks.
  async violations() {
    await page.evaluate(axe.source);
    const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
    return violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target} ${failureSummary}`));
  },
  async quit() {
    await browser.close();
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { command, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[command](given)) ?? null };
  } catch (error) {
    answer = { error: `${command} ${JSON.stringify(given)}: ${error.message}` };
  }
  console.log(JSON.stringify(answer));
  if (command === "quit") process.exit(0);
}
