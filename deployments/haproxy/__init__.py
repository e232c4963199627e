"""HAProxy as Manta runs it: Serve renders HAProxy's configuration and starts our launcher, which
makes that configuration ours and becomes HAProxy.

    Serve's HAProxyManager --haproxy.cfg--> launcher: rewrite, check --exec--> haproxy

Serve's template has no setting for slow heads, for many connections from one address, for TLS or
for access to the statistics. `rewrite` puts these in. It refuses a file that it does not recognise:
a setting that has lost its place must not be lost in silence.
"""
