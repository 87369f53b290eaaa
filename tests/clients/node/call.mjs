// Calls a server through `openai`, and through `ai` with @ai-sdk/openai-compatible, and prints what came as one JSON
// object. Arguments: the server's address and the name of a model.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import OpenAI from "openai";

const [root, model] = process.argv.slice(2);
const question = "Tell me a story about a fox.";
const messages = [{ role: "user", content: question }];
const came = {};

const openai = new OpenAI({ baseURL: `${root}/v1`, apiKey: "any", maxRetries: 0 });
const limits = { model, temperature: 0, max_tokens: 24 };
const chat = await openai.chat.completions.create({ ...limits, messages });
came.chat = chat.choices[0].message.content;
came.chatTokens = chat.usage.completion_tokens;
came.chatStreamed = "";
for await (const chunk of await openai.chat.completions.create({ ...limits, messages, stream: true })) {
  came.chatStreamed += chunk.choices[0]?.delta?.content ?? "";
}
came.accumulated = (
  await openai.chat.completions.stream({ ...limits, messages }).finalChatCompletion()
).choices[0].message.content;
came.completion = (await openai.completions.create({ ...limits, prompt: "Once upon a time" })).choices[0].text;
came.models = (await openai.models.list()).data.map((listed) => listed.id);
const asked = { model, temperature: 0, max_output_tokens: 24, input: question };
const response = await openai.responses.create(asked);
came.response = response.output_text;
came.responseStreamed = "";
came.events = [];
for await (const event of await openai.responses.create({ ...asked, stream: true })) {
  if (came.events.at(-1) !== event.type) came.events.push(event.type);
  if (event.type === "response.output_text.delta") came.responseStreamed += event.delta;
}
try {
  await openai.chat.completions.create({ ...limits, messages, model: "no-such-model" });
} catch (error) {
  came.unknownModel = [error.constructor.name, error.status, error.code, Boolean(error.requestID)];
}
const aborted = await openai.chat.completions.create({ ...limits, messages, max_tokens: 500, stream: true });
for await (const _ of aborted) {
  aborted.controller.abort();
  came.aborted = true;
}

const compatible = createOpenAICompatible({
  name: "trunkline",
  baseURL: `${root}/v1`,
  apiKey: "any",
  includeUsage: true,
});
const options = { model: compatible(model), temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const generated = await generateText({ ...options, prompt: question });
came.generated = generated.text;
came.generatedEnd = generated.finishReason;
came.generatedTokens = generated.usage.outputTokens;
const streamed = streamText({ ...options, messages });
came.streamed = "";
for await (const piece of streamed.textStream) came.streamed += piece;
came.streamedEnd = await streamed.finishReason;
came.streamedTokens = (await streamed.usage).outputTokens;
came.completed = (
  await generateText({ ...options, model: compatible.completionModel(model), prompt: question })
).text.length;
try {
  await generateText({ ...options, model: compatible("no-such-model"), prompt: question });
} catch (error) {
  came.callError = [APICallError.isInstance(error), error.statusCode];
}
console.log(JSON.stringify(came));
