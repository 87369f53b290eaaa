// Lets a model answer a question with a tool, through `openai` and through `ai` with @ai-sdk/openai-compatible, and
// prints what came as one JSON object. Arguments: the server's address, the name of a model, and the question.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const [root, model, question] = process.argv.slice(2);
const messages = [{ role: "user", content: question }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const description = "The weather in a city.";
const weatherIn = ({ city }) => `${city}: 18 degrees and clear`;
const came = {};

const openai = new OpenAI({ baseURL: `${root}/v1`, apiKey: "any", maxRetries: 0 });
const runnable = {
  type: "function",
  function: { name: "get_weather", description, parameters, parse: JSON.parse, function: weatherIn },
};
for (const stream of [false, true]) {
  const runner = openai.chat.completions.runTools({ model, messages, tools: [runnable], stream });
  came[stream ? "runnerStreamed" : "runner"] = await runner.finalContent();
}

const compatible = createOpenAICompatible({ name: "trunkline", baseURL: `${root}/v1`, apiKey: "any" });
const asked = {
  model: compatible(model),
  messages,
  maxRetries: 0,
  stopWhen: stepCountIs(4),
  tools: { get_weather: tool({ description, inputSchema: jsonSchema(parameters), execute: weatherIn }) },
};
const shown = (steps) =>
  steps.map((step) => [step.reasoningText ?? "", step.toolCalls.map((call) => call.input), step.finishReason]);
const generated = await generateText(asked);
came.generated = [shown(generated.steps), generated.text];
const streamed = streamText(asked);
came.parts = [];
for await (const part of streamed.fullStream) if (came.parts.at(-1) !== part.type) came.parts.push(part.type);
came.streamed = [shown(await streamed.steps), await streamed.text];
console.log(JSON.stringify(came));
