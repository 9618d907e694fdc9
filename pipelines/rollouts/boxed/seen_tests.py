"""Runs the functions `test_*` of every test file in the folder, and says which failed. The standard library alone."""

import importlib.util
import os
import sys
import traceback


def main():
    """One line for each that failed, and how many did not."""
    sys.path.insert(0, os.getcwd())
    passed, failed, skipped = 0, [], 0
    for folder, folders, names in os.walk("."):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(("test_", "seen_test_")) and name.endswith(".py"):
                path = os.path.join(folder, name)
                try:
                    spec = importlib.util.spec_from_file_location(name[:-3], path)
                    module = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(module)
                except ImportError:
                    skipped += 1  # it wants a package that is not here
                    continue
                for word, value in sorted(vars(module).items()):
                    if (
                        word.startswith("test")
                        and callable(value)
                        and getattr(value, "__code__", None) is not None
                        and not value.__code__.co_argcount
                    ):
                        try:
                            value()
                            passed += 1
                        except Exception:
                            failed.append(f"{path}::{word}\n{traceback.format_exc(limit=-1)}")
    print("\n".join(failed).replace(os.getcwd() + "/", ""))  # where a workspace lies is nobody's business
    print(f"{passed} passed, {len(failed)} failed, {skipped} files want packages that are not here")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
