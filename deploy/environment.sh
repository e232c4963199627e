# Read before `ray start` on every node. A name that is missing here is a slower or a cut stream.

# Ray asks for the token in ~/.ray/auth_token on every connection.
export RAY_AUTH_MODE=token
# Nodes live on for ten minutes without a head (one by default): streams go on, and it may come back.
export RAY_gcs_rpc_server_reconnect_timeout_s=600
ulimit -n 65536

# What deployments/app.py asks of a cluster's processes: HAProxy in front of the routers, streams of
# up to an hour across its reloads, our form of its servers' errors, no needless hops between threads.
export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=5
export RAY_SERVE_ENABLE_HA_PROXY=1
export RAY_SERVE_THROUGHPUT_OPTIMIZED=1
export RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=3600
export RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S=35
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.api.http.uvicorn_hooks:install
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS=5000
export RAY_SERVE_PORT_QUARANTINE_S=3630
export RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE=1000
export RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0
export RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0
export RAY_SERVE_USE_GRPC_BY_DEFAULT=1
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1
export RAY_SERVE_HAPROXY_RETRY_ON='conn-failure empty-response'
export RAY_worker_niceness=0

# HAProxy's files in a folder of ours alone, with a name so short that its sockets fit, and what Serve
# starts in its place: our launcher, which bounds slow clients and keeps statistics on loopback. It
# takes http.tls and http.connections* of manta.yaml from MANTA_EDGE: docs/deploy.md.
EDGE=$(env -u TMPDIR mktemp -d)
RAY_SERVE_HAPROXY_BINARY_PATH=$(python3 -m deployments.haproxy --install "$EDGE/haproxy") || exit 1
export RAY_SERVE_HAPROXY_BINARY_PATH
export RAY_SERVE_HAPROXY_CONFIG_FILE_LOC="$EDGE/haproxy.cfg"
export RAY_SERVE_HAPROXY_SOCKET_PATH="$EDGE/admin.sock"
export RAY_SERVE_HAPROXY_SERVER_STATE_BASE="$EDGE"
export RAY_SERVE_HAPROXY_SERVER_STATE_FILE="$EDGE/server-state"
export RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH="$EDGE/metrics.sock"
