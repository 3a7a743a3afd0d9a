#!/usr/bin/env bash
# A walk through the server with curl. Start it first, in another terminal:
#
#   openssl rand -hex 32 > key && chmod 600 key
#   pdllm serve --store kb --api-key-file key
#
# Then: URL=http://127.0.0.1:8000 KEY_FILE=key bash curl.sh
set -euo pipefail
cd "$(dirname "$0")"
URL=${URL:-http://127.0.0.1:8000}
KEY_FILE=${KEY_FILE:-key}
HANDBOOK=../handbook

# The key goes to curl through a file: on the command line other users of the machine could read it.
pdllm_curl() {
  curl --silent --show-error --fail-with-body --header @<(printf 'Authorization: Bearer %s' "$(cat "$KEY_FILE")") "$@"
}

field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

echo '== is it there, and does it answer?'
curl --silent --fail "$URL/health"; echo
pdllm_curl "$URL/ready"; echo

echo '== add a file and a text, and wait for both'
for job in \
  "$(pdllm_curl "$URL/v1/documents" --form "file=@$HANDBOOK/people/leave-policy-2025.md;filename=people/leave-policy-2025.md" | field id)" \
  "$(pdllm_curl "$URL/v1/documents" --json '{"documents": [{"doc_id": "note", "text": "The Porto office has a cat.", "metadata": {"kind": "note"}}]}' | field id)"
do
  until [[ "$(pdllm_curl "$URL/v1/jobs/$job" | field state)" =~ ^(done|failed|stopped)$ ]]; do sleep 0.2; done
  pdllm_curl "$URL/v1/jobs/$job"; echo
done

echo '== ask'
pdllm_curl "$URL/v1/qa" --json '{"question": "How many days of paid annual leave are there in 2025?"}'; echo

echo '== ask the notes only, and watch the events come'
pdllm_curl --no-buffer "$URL/v1/qa" --json '{"question": "Which office has a cat?", "filter": {"kind": "note"}, "stream": true}'

echo '== list, read around a place, delete'
pdllm_curl "$URL/v1/documents?limit=10"; echo
pdllm_curl "$URL/v1/documents/people/leave-policy-2025.md?start=560&end=720"; echo
pdllm_curl --request DELETE "$URL/v1/documents/note"; echo

echo '== figures for Prometheus'
pdllm_curl "$URL/metrics" | grep -E '^pdllm_(requests_total|store_bytes|chunks_total)'
