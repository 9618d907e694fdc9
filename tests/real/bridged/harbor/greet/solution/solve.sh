#!/bin/bash
set -e
printf 'Hello, %s\n' "$(cat name.txt)" > greeting.txt
