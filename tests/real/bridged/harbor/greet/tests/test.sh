#!/bin/bash
# Graded in parts: half for the file, all for what is in it.
mkdir -p /logs/verifier
if [ "$(cat greeting.txt 2>/dev/null)" = "Hello, $(cat name.txt)" ]; then
  echo '{"reward": 1.0, "exists": 1.0}' > /logs/verifier/reward.json
elif [ -e greeting.txt ]; then
  echo '{"reward": 0.5, "exists": 1.0}' > /logs/verifier/reward.json
else
  echo '{"reward": 0.0, "exists": 0.0}' > /logs/verifier/reward.json
fi
