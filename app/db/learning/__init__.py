"""What is learned from, in SQL: labels, rules, batches, cycles, runs, rollouts and where the words of suites come from."""
