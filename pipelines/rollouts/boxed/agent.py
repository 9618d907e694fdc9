"""A small coding agent: the harness that comes with us, and the product's too. The standard library and one file, so that it runs anywhere.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python agent.py TASK.json

TASK.json: {"instruction": text, "answer_file": path or null, "most_turns": n, "max_tokens": n, "test_command": argv or null}. It works
in the folder that it is started in. It asks for completions until an answer calls no tool, does what the calls say, and gives up after
most_turns. Exit code 0: it came to an end; 3: the turns were used up; 4: the service refused; 5: the last answer had nothing in it.

With OPENAI_SEARCH_MODEL one step of it is another model's: before the first turn, and where the tool `find` is called, that model names up
to four texts to look for at once, sees where they stand, and names the files and lines that matter: two short answers.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

MOST_RESULT_CHARS = 8000
SHELL_S = 60.0
SYSTEM = "You are a careful programmer. You work in the current folder with the tools you are given."
MOST_TEXTS, MOST_PLACES, MOST_PATHS, MOST_HITS, MOST_LINES, SEARCH_TOKENS = 4, 4, 100, 60, 60, 200
SEARCH_SYSTEM = (
    "You find the files and lines of a project that matter for a task. First name a few texts to look for, then the places, few and exact."
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read lines of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "first": {"type": "integer"}, "last": {"type": "integer"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Replace a text that is in a file exactly once by another; with an empty `old`, write the whole file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
                "required": ["path", "old", "new"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find the lines of all files that match a regular expression.",
            "parameters": {
                "type": "object",
                "properties": {"pattern": {"type": "string"}},
                "required": ["pattern"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command of the shell.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "test",
            "description": "Run the tests that are to be seen.",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Ask a search model which files and lines matter for a question, and read them.",
        "parameters": {
            "type": "object",
            "properties": {"question": {"type": "string"}},
            "required": ["question"],
            "additionalProperties": False,
        },
    },
}
TEXTS = {
    "type": "object",
    "properties": {"texts": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": MOST_TEXTS}},
    "required": ["texts"],
    "additionalProperties": False,
}


def main(path):
    """Work on the task."""
    with open(path) as file:
        task = json.load(file)
    messages = [{"role": "user", "content": task["instruction"] + found_first(task)}]
    if task["answer_file"] is None:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    for _ in range(task["most_turns"]):
        message = ask(messages, task)
        if message is None:
            return 4
        calls = message.get("tool_calls") or []
        if task["answer_file"] is not None:
            return answer(message.get("content") or "", task["answer_file"])
        if not calls:
            return 0
        messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": calls})
        for call in calls:
            said = use(call["function"]["name"], call["function"]["arguments"], task)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said[:MOST_RESULT_CHARS]})
    return 3


def ask(messages, task):
    """One completion; None where the service refuses."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": task["max_tokens"], "temperature": 1.0}
    if task["answer_file"] is None:
        body["tools"] = [*TOOLS, FIND] if os.environ.get("OPENAI_SEARCH_MODEL") else TOOLS
    return completion(body)


def completion(body):
    """The message of an answer; None where the service refuses."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=3600) as answered:
            return json.loads(answered.read())["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace")[:500], file=sys.stderr)
        return None


def answer(text, path):
    """Write the code of an answer."""
    code = code_of(text)
    with open(path, "w") as file:
        file.write(code)
    return 0 if code.strip() else 5


def code_of(text):
    """Its first block, or all of it where it has none."""
    found = re.search(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return found.group(1) if found else text


def use(name, arguments, task):
    """What a tool says; what goes wrong is said too, as the model is the one to mend it."""
    known = {"read": read, "edit": edit, "search": search, "shell": shell, "test": test}
    if os.environ.get("OPENAI_SEARCH_MODEL"):
        known["find"] = find
    try:
        given = json.loads(arguments or "{}")
        if name not in known:
            return f"error: there is no tool {name!r}"
        return known[name](given, task)
    except (ValueError, KeyError, TypeError, OSError, re.error) as error:
        return f"error: {type(error).__name__}: {error}"


def read(given, task):
    """Lines with their numbers."""
    lines = lines_of(given["path"])
    first = max(1, int(given.get("first", 1)))
    last = min(len(lines), int(given.get("last", first + 199)))
    return "\n".join(f"{n}\t{lines[n - 1]}" for n in range(first, last + 1))


def edit(given, task):
    """Write."""
    path, new = inside(given["path"]), given["new"]
    if not isinstance(new, str):
        raise TypeError("`new` has to be a text")
    if not given["old"]:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w") as file:
            file.write(new)
        return "written"
    with open(path) as file:
        text = file.read()
    found = text.count(given["old"])
    if found != 1:
        return f"error: `old` is there {found} times and has to be there once"
    with open(path, "w") as file:
        file.write(text.replace(given["old"], new))
    return "replaced"


def search(given, task):
    """Path, number and text of lines, in order."""
    wanted, found = re.compile(given["pattern"]), []
    for path in paths():
        with open(path, errors="replace") as file:
            found += [f"{path}:{n}: {line.rstrip()}" for n, line in enumerate(file, 1) if wanted.search(line)]
    return "\n".join(found[:100]) or "nothing"


def paths():
    """Of the files of this folder, in order; what is hidden is nobody's business."""
    found = []
    for folder, folders, names in os.walk("."):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.relpath(os.path.join(folder, name)) for name in sorted(names)]
    return found


def found_first(task):
    """What the search model finds for the task itself; nothing where there is no such model, or nothing to choose from."""
    if not os.environ.get("OPENAI_SEARCH_MODEL") or len(paths()) < 2:
        return ""
    said = use("find", json.dumps({"question": task["instruction"]}), task)
    if said.startswith("error:"):
        print(said, file=sys.stderr)
        return ""
    return "\n\nWhat a search found:\n" + said


def find(given, task):
    """The lines that the search model names: it says what to look for, all at once, sees where that stands, and chooses."""
    known = paths()
    if not known:
        return "there are no files"
    messages = [
        {"role": "system", "content": SEARCH_SYSTEM},
        {"role": "user", "content": given["question"] + "\n\nFiles:\n" + "\n".join(known[:MOST_PATHS])},
    ]
    texts = shaped(messages, "texts", TEXTS)[:MOST_TEXTS]
    hits = where(texts, known)
    among = sorted({path for path, _, _ in hits}) or known
    said = "\n".join(f"{path}:{n}: {line}" for path, n, line in hits) or "These texts stand nowhere."
    messages.append({"role": "assistant", "content": json.dumps({"texts": texts})})
    messages.append({"role": "user", "content": said + "\n\nWhich places matter?"})
    return shown(shaped(messages, "places", places_of(among[:MOST_PATHS]))[:MOST_PLACES])


def shaped(messages, name, schema):
    """What the search model answers under this name, in this form."""
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    body = {"model": os.environ["OPENAI_SEARCH_MODEL"], "messages": messages, "max_tokens": SEARCH_TOKENS, "temperature": 1.0}
    message = completion({**body, "response_format": form})
    if message is None:
        raise OSError("the search model does not answer")
    return json.loads(message.get("content") or "")[name]


def where(texts, known):
    """(path, number, line) of the lines that hold one of the texts, the first so many."""
    found, wanted = [], [text.lower() for text in texts if text.strip()]
    for path in known:
        with open(path, errors="replace") as file:
            found += [(path, n, line.rstrip()[:160]) for n, line in enumerate(file, 1) if any(text in line.lower() for text in wanted)]
    return found[:MOST_HITS]


def places_of(among):
    """The form of an answer that names places in these files."""
    number = {"type": "integer", "minimum": 1, "maximum": max(1, *(len(lines_of(path)) for path in among))}
    place = {
        "type": "object",
        "properties": {"path": {"enum": among}, "first": number, "last": number},
        "required": ["path", "first", "last"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"places": {"type": "array", "items": place, "minItems": 1, "maxItems": MOST_PLACES}},
        "required": ["places"],
        "additionalProperties": False,
    }


def lines_of(path):
    """Of a file."""
    with open(inside(path), errors="replace") as file:
        return file.read().splitlines()


def shown(places):
    """The lines of these places, with their numbers."""
    said = []
    for place in places:
        lines, first = lines_of(place["path"]), place["first"]
        last = min(len(lines), max(first, place["last"]), first + MOST_LINES - 1)
        said.append("\n".join([f"{place['path']}:{first}-{last}", *(f"{n}\t{lines[n - 1]}" for n in range(first, last + 1))]))
    return "\n".join(said)


def shell(given, task):
    """Exit code and what was said."""
    return command(["/bin/sh", "-c", given["command"]])


def test(given, task):
    """The tests that are to be seen."""
    return command(task["test_command"]) if task.get("test_command") else "there are no tests to be seen"


def command(argv, within_s=SHELL_S):
    """A program in the folder, without the key. It speaks into files: what it leaves running would hold a pipe open, and us."""
    left = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(argv, stdout=out, stderr=err, timeout=within_s, env=left, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return f"error: still running after {within_s:g} s"
        said = b"".join(end_of(file) for file in (out, err))
    return f"exit code {done.returncode}\n" + said.decode(errors="replace")[-MOST_RESULT_CHARS:]


def end_of(file):
    """As much of it as a result may have."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * MOST_RESULT_CHARS))
    return file.read()


def inside(path):
    """A path of this folder."""
    if os.path.isabs(path) or ".." in path.split("/"):
        raise ValueError("a path of this folder, please")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
