#!/bin/sh
# Write schema.json anew: what Grafana stores of a dashboard and of each panel, from its published types.
#   tests/grafana/generate.sh 13.2.3
set -eu
version=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/entry.ts" "$work"
cd "$work"
echo '{"private": true}' > package.json
echo '{"compilerOptions": {"module": "esnext", "moduleResolution": "bundler", "target": "es2022", "skipLibCheck": true},
"files": ["entry.ts"]}' > tsconfig.json
npm install --silent --no-audit --no-fund "@grafana/schema@$version" ts-json-schema-generator@2 typescript@5
npx --no-install ts-json-schema-generator -f tsconfig.json -p entry.ts -t Root --no-type-check --expose none \
    --no-top-ref -o all.json
cp node_modules/@grafana/schema/LICENSE_APACHE2 "$here/LICENSE"
# Without texts, and without what is required: Grafana fills in defaults.
python3 - "$version" all.json "$here/schema.json" <<'END'
import json
import sys


def bare(node, names=False):
    if isinstance(node, dict):
        kept = {key: value for key, value in node.items()
                if names or not (key == "required" or key in ("description", "default", "$comment", "deprecated"))}
        return {key: bare(value, key == "properties" and not names) for key, value in kept.items()}
    return [bare(one) for one in node] if isinstance(node, list) else node


version, source, target = sys.argv[1:]
with open(source) as file:
    schema = bare(json.load(file))
schema["$comment"] = f"From @grafana/schema {version}, Apache-2.0 (LICENSE), by generate.sh"
with open(target, "w") as file:
    json.dump(schema, file, indent=1, sort_keys=True)
    file.write("\n")
END
