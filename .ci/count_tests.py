"""Counts single tests in the reports of one `bazel test`, by its build events: 'N passed, N failed, N skipped'.

Exits 1 when something failed or nothing ran. A target that failed without a failed test in its report (it crashed,
timed out, or was not built) counts as one failure.
"""

import json
import sys
import xml.etree.ElementTree
from urllib.parse import unquote, urlsplit


def count(report: str) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit report."""
    try:
        cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return 0, 0, 0
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - failed - skipped, failed, skipped


def main(path: str) -> int:
    with open(path) as lines:
        events = [json.loads(line) for line in lines if line.strip()]
    totals, broken, elsewhere = [0, 0, 0], [], set()
    last_attempts = {}
    for event in events:
        if "testResult" in event and "testResult" in event["id"]:
            key = event["id"]["testResult"]
            last_attempts[key["label"], key.get("shard", 0)] = event["testResult"]
        elif "aborted" in event:
            label = next(iter(event["id"].values()), {}).get("label", "the build")
            if event["aborted"].get("reason") == "SKIPPED":
                elsewhere.add(label)
                continue
            broken.append(f"{label}: {event['aborted'].get('description') or event['aborted'].get('reason')}")
    for (label, shard), result in sorted(last_attempts.items()):
        reports = [file["uri"] for file in result.get("testActionOutput", []) if file["name"] == "test.xml"]
        counted = [count(unquote(urlsplit(uri).path)) for uri in reports]
        for index in range(3):
            totals[index] += sum(numbers[index] for numbers in counted)
        if result.get("status") not in ("PASSED", "FLAKY") and not any(numbers[1] for numbers in counted):
            broken.append(f"{label} shard {shard}: {result.get('status')}")
    if elsewhere:
        print(f"not for the GPU of this machine: {', '.join(sorted(elsewhere))}")
    for line in sorted(set(broken)):
        print(f"not run to its end: {line}")
    passed, failed, skipped = totals[0], totals[1] + len(set(broken)), totals[2]
    if not passed and not failed:
        print("no test was executed")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
