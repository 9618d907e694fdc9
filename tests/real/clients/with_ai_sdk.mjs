import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const say = (what, seen) => console.log(JSON.stringify({ what, ...seen }));
const openai = createOpenAI({ baseURL: process.env.BASE_URL + "/v1", apiKey: "unused" });
const common = { model: openai("composer"), maxRetries: 0, maxOutputTokens: 200 };

const plain = await generateText({ ...common, prompt: "def f(x):" });
say("generate", { id: plain.response.id, text: plain.text });
const streamed = streamText({ ...common, prompt: "def f(x):" });
let text = "";
for await (const part of streamed.textStream) text += part;
say("stream", { id: (await streamed.response).id, text });
const schema = z.object({ word: z.enum(["hi", "hello"]), times: z.union([z.literal(1), z.literal(2)]) });
const typed = await generateText({ ...common, prompt: "Greet me.", output: Output.object({ schema }) });
say("object", { id: typed.response.id, object: typed.output });
const greet = tool({ description: "Greets.", inputSchema: z.object({ word: z.enum(["hi", "hello"]) }) });
const called = await generateText({ ...common, prompt: "Greet me.", tools: { greet }, toolChoice: "required", providerOptions: { openai: { parallelToolCalls: false } } });
say("required", { calls: called.toolCalls.map((call) => call.toolName) });
const chat = await generateText({ ...common, model: openai.chat("composer"), prompt: "def f(x):" });
say("chat", { id: chat.response.id, text: chat.text });
