"""HAProxy with Manta's configuration: our launcher rewrites the configuration that Serve renders.

  Serve's HAProxyManager --haproxy.cfg--> launcher: rewrite, check --exec--> haproxy

Serve's template has no settings for slow request heads, many connections from one address, TLS or
access to the statistics. `rewrite` adds these settings. It refuses files in an unknown form, so
that no setting is lost unnoticed.
"""
