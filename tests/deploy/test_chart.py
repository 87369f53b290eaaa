"""The chart renders with a real Helm, is valid, and its objects agree with one another and with the processes."""

import functools
import json
import re
import tomllib
from base64 import b64decode
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from deploy.lint.chart_schema import SCHEMA, generated
from tests.deploy.chart import (
    ALL_VALUES,
    CHART,
    DEFAULT,
    EVERYTHING,
    EXTERNAL_SECRET,
    EXTERNAL_URL,
    HOST_PATH,
    IDENTITIES,
    KUBERNETES,
    MUTUAL,
    NO_REDIS,
    OWN_PASSWORD,
    PASSWORD,
    PASSWORD_IN_SECRET,
    PLACED,
    PLAIN,
    SECURED,
    SEVERAL_POOLS,
    Rendered,
    Values,
    pod_of,
    port_of,
    selected,
)
from trunkline_router.access.tenants_file import read_tenants
from trunkline_router.quotas.quota import QUOTA_NAMES
from trunkline_router.settings import (
    RouterSettings,
    address_problem,
    sharing_problem,
)
from trunkline_runtime.server import LIVENESS, READINESS
from trunkline_runtime.settings import parse_settings
from trunkline_worker.front_settings import WorkerSettings

SETTINGS = {"router": RouterSettings, "worker": WorkerSettings}
ROUTER = "demo-trunkline-router"
PYPROJECT = CHART.parents[1] / "pyproject.toml"
MOST_STATEFUL_SET_NAME = (
    52  # its pods have a label of 63 characters at most with the name, a dash and a hash of ten characters
)
MOST_NAME = 63


def revision(name: str) -> Values:
    return {"workers": {"a": {"model": {"hub": {"id": "org/model", "revision": name, "size": "9Gi"}}}}}


@functools.cache
def rendered_once(name: str) -> Rendered:
    return Rendered(ALL_VALUES[name])


@pytest.fixture(params=list(ALL_VALUES))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return rendered_once(request.param)


@pytest.fixture
def schemas_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker would read 2 MB of JSON for every object."""
    monkeypatch.setattr("kubernetes_validate.utils.schema_contents", schema_contents)


schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@pytest.mark.parametrize("values", ALL_VALUES.values(), ids=ALL_VALUES.keys())
def test_helm_has_nothing_to_say_against_the_chart(values: Values) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [found["error"] for found in report["messages"]] == ["icon is recommended"]


@pytest.mark.usefixtures("schemas_read_once")
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_what_the_api_knows(rendered: Rendered, version: str) -> None:
    assert len(rendered.objects) >= 7
    for item in rendered.objects:
        assert kubernetes_validate.validate(item, version, strict=True) == version


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"router": {"replicaz": 1}}, "at '/router': additional properties 'replicaz' not allowed"),
        ({"router": {"config": {"max_choises": 1}}}, "'/router/config': additional properties 'max_choises' not"),
        ({"router": {"config": {"port": 1}}}, "'/router/config': additional properties 'port' not allowed"),
        ({"router": {"tenants": {"acme": {"wait": 1}}}}, "'/router/tenants/acme': additional properties 'wait' not"),
        ({"router": {"config": {"api_keys": "x"}}}, "'/router/config': additional properties 'api_keys' not allowed"),
        ({"router": {"http": {"port": 0}}}, "at '/router/http/port': minimum: got 0, want 1"),
        ({"identity": {"apiKeys": "keys"}}, "at '/identity/apiKeys': got string, want object"),
        ({"router": {"port": 0}}, "at '/router/port': minimum: got 0, want 1"),
        ({"router": {"podDisruptionBudget": {"maxUnavailable": 0}}}, "at '/router/podDisruptionBudget/maxUnavailable'"),
        ({"workers": {"qwen3-0-6b": None}}, "at '/workers': minProperties: got 0, want 1"),
        ({"workers": {"a": {}}}, "at '/workers/a': missing property 'model'"),
        ({"workers": {"a": {"model": {}}}}, "at '/workers/a/model': minProperties: got 0, want 1"),
        ({"workers": {"a": {"model": {"hostPath": {"path": "x"}}}}}, "at '/workers/a/model/hostPath/path'"),
        ({"workers": {"a": {"model": {"hub": {"id": "o/m", "size": "9Gi"}}}}}, "/hub': missing property 'revision'"),
        (revision("0e9e39f"), "at '/workers/a/model/hub/revision': '0e9e39f' does not match pattern"),
        (revision("DEADBEEF"), "at '/workers/a/model/hub/revision': 'DEADBEEF' does not match pattern"),
        (revision("c" * 39), "at '/workers/a/model/hub/revision'"),
        (revision("c" * 41), "at '/workers/a/model/hub/revision'"),
        (revision(""), "at '/workers/a/model/hub/revision'"),
        ({"workers": {"A_B": HOST_PATH}}, "at '/workers': additional properties 'A_B' not allowed"),
        (
            {"workers": {"a": HOST_PATH | {"config": {"block_size": 0}}}},
            "/workers/a/config/block_size': minimum: got 0",
        ),
        ({"workers": {"a": HOST_PATH | {"config": {"dtype": "int3"}}}}, "/a/config/dtype': value must be one of"),
        ({"workers": {"a": HOST_PATH | {"sharedMemory": "much"}}}, "/workers/a/sharedMemory'"),
        ({"workerDefaults": {"gpu": 1}}, "at '/workerDefaults': additional properties 'gpu' not allowed"),
        ({"redis": {"external": {"url": "http://x"}}}, "at '/redis/external/url'"),
        ({"redis": {"password": "hunter2"}}, "at '/redis/password'"),
        ({"redis": {"password": "correct:horse@battery/staple"}}, "at '/redis/password'"),
        ({"serviceAccount": {"automount": True}}, "at '/serviceAccount': additional properties 'automount' not"),
        ({"test": {"image": "x"}}, "at '/test': additional properties 'image' not allowed"),
        ({"networkpolicy": {}}, "additional properties 'networkpolicy' not allowed"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_name(values: Values, said: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as caught:
        Rendered(values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("redis", "said"),
    [
        ({"external": {"url": "redis://x:1"}}, "redis.external is set: also set redis.enabled to false"),
        ({"password": PASSWORD, "existingSecret": {"name": "cache"}}, "one of them holds the password"),
        ({"enabled": False, "password": PASSWORD}, "are for the chart's own Redis"),
        ({"enabled": False, "existingSecret": {"name": "cache"}}, "are for the chart's own Redis"),
    ],
)
def test_values_of_redis_that_contradict_each_other_are_refused(redis: Values, said: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=re.escape(said)):
        Rendered({"redis": redis})


ALONE: Values = {"replicas": 1}
TWO_PROCESSES: Values = {"replicas": 1, "config": {"processes": 2}}
TWO_BY_ENVIRONMENT: Values = {"replicas": 1, "env": [{"name": "TRUNKLINE_PROCESSES", "value": "2"}]}
URL_IN_ENVIRONMENT: Values = {
    "env": [{"name": "TRUNKLINE_REDIS_URL", "valueFrom": {"secretKeyRef": {"name": "cache", "key": "url"}}}]
}


@pytest.mark.parametrize(
    "router", [{}, TWO_PROCESSES, TWO_BY_ENVIRONMENT], ids=["two replicas", "two processes", "two by the environment"]
)
@pytest.mark.parametrize("tenant", ["acme", "*"])
@pytest.mark.parametrize("quota", QUOTA_NAMES)
def test_quotas_that_several_routers_would_each_count_alone_are_refused(
    router: Values, tenant: str, quota: str
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        Rendered(NO_REDIS | {"router": router | {"tenants": {"first": {"weight": 2}, tenant: {quota: 600}}}})
    said = f'router.tenants: {quota} of "{tenant}": 2 routers (replicas x config.processes) would each count it alone'
    assert f"{said}: set redis.enabled or redis.external" in str(caught.value)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("router", "redis"),
    [
        ({}, {}),
        ({}, EXTERNAL_URL),
        ({}, EXTERNAL_SECRET),
        (URL_IN_ENVIRONMENT, NO_REDIS),
        (ALONE, NO_REDIS),
    ],
    ids=["own redis", "external", "external, secret", "URL in the environment", "one router"],
)
def test_quotas_that_can_be_kept_are_taken(router: Values, redis: Values) -> None:
    rendered = Rendered(redis | {"router": router | {"tenants": {"acme": {"tokens_per_minute": 90_000}}}})
    told = "TRUNKLINE_REDIS_URL" in environment_of(rendered, "router")
    assert told or rendered.one("Deployment", "demo-trunkline-router")["spec"]["replicas"] == 1


def test_routers_without_quotas_need_no_redis() -> None:
    tenants = {"acme": {"weight": 3, "lane": "batch", "cache_group": "a"}}
    Rendered(NO_REDIS | {"router": {"config": {"processes": 2}, "tenants": tenants}})


STORE: Values = {"max_stored_responses": 100}


def in_environment(name: str, value: str) -> Values:
    return {"env": [{"name": name, "value": value}]}


@pytest.mark.parametrize(
    ("router", "routers"),
    [
        ({"config": STORE}, 2),
        ({"config": {**STORE, "processes": 2}}, 4),
        ({"replicas": 1, "config": {**STORE, "processes": 2}}, 2),
        (in_environment("TRUNKLINE_MAX_STORED_RESPONSES", "100"), 2),
        ({"replicas": 1, "config": STORE, **in_environment("TRUNKLINE_PROCESSES", "3")}, 3),
    ],
    ids=["two replicas", "both", "two processes", "store in the environment", "processes in the environment"],
)
def test_responses_that_only_one_of_several_routers_would_have_are_not_stored(router: Values, routers: int) -> None:
    said = refusal({"router": router})
    assert f"router.config.max_stored_responses: of {routers} routers (replicas x config.processes) only one" in said
    assert "\n" not in said.strip()


@pytest.mark.parametrize("name", ["TRUNKLINE_PROCESSES", "TRUNKLINE_MAX_STORED_RESPONSES"])
@pytest.mark.parametrize("router", [{}, ALONE], ids=["two replicas", "one router"])
def test_a_number_that_the_chart_cannot_see_is_refused_where_stored_responses_depend_on_it(
    name: str, router: Values
) -> None:
    source = {"configMapKeyRef": {"name": "numbers", "key": "number"}}
    said = refusal({"router": router | {"config": STORE, "env": [{"name": name, "valueFrom": source}]}})
    assert f"router.env: {name}: it decides whether clients find stored responses" in said
    assert "set it in router.config or by value" in said
    assert "\n" not in said.strip()


@pytest.mark.parametrize(
    "router",
    [
        ALONE | {"config": STORE},
        {"config": {"max_stored_responses": 0, "processes": 2}},
        {"config": STORE} | in_environment("TRUNKLINE_MAX_STORED_RESPONSES", "0"),
    ],
    ids=["one router", "no store", "no store by the environment"],
)
def test_one_router_may_store_responses_and_several_may_without_a_store(router: Values) -> None:
    assert Rendered({"router": router}).one("Deployment", ROUTER)["spec"]["replicas"] == router.get("replicas", 2)


def test_the_schema_knows_the_settings_as_they_are() -> None:
    present = json.loads(SCHEMA.read_text())
    assert present == generated(present), "run make chart-schema"


def config_of(rendered: Rendered, workload: Any, container: Any) -> tuple[str, Any]:
    """The file of a container's --config, as (text, parsed object)."""
    (flag,) = container["args"]
    folder, _, name = flag.removeprefix("--config=").rpartition("/")
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
    (volume,) = [volume for volume in pod_of(workload)["volumes"] if volume["name"] == mount["name"]]
    data = rendered.one("ConfigMap", volume["configMap"]["name"])["data"]
    return data[name], data


def test_processes_accept_their_settings_and_listen_where_everybody_looks(rendered: Rendered, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for workload, container in rendered.ours():
        text, data = config_of(rendered, workload, container)
        if "tenants.json" in data:
            tenants = tmp_path / "tenants.json"
            tenants.write_text(data["tenants.json"])
            assert read_tenants(str(tenants)).terms("acme").weight == 3
            assert json.loads(text)["tenants"] == "/etc/trunkline/tenants.json"
        file.write_text(text)
        # What secrets hold is not in the chart.
        environment = {entry["name"]: "rediss://x" for entry in container["env"] if entry["name"].endswith("REDIS_URL")}
        settings: Any = parse_settings(SETTINGS[container["name"]], [f"--config={file}"], environment, prog="test")
        assert settings.host == "0.0.0.0"
        assert settings.port == port_of(container)
        if isinstance(settings, RouterSettings):
            assert settings.http.http_port == (port_of(container, "http") or -1)
            assert settings.identity.problem(settings.redis_url) is None
            assert settings.identity.exposure_problem(settings.host) is None
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == settings.tls.health_port != settings.port
        assert container["readinessProbe"]["grpc"]["service"] == READINESS
        assert container["livenessProbe"]["grpc"]["service"] == LIVENESS


def refusal(values: Values) -> str:
    """What Helm says to values that it does not render."""
    with pytest.raises(helm_python.HelmRenderError) as caught:
        Rendered(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"allowPlaintext": False},
            "set tls.routerSecret and tls.workerSecret, or permit plaintext with allowPlaintext",
        ),
        (
            {"allowPlaintext": True, "identity": SECURED["identity"], "router": SECURED["router"]},
            "workers.qwen3-0-6b: any client could use it: set tls, TRUNKLINE_GRANT_KEY in env",
        ),
        ({"tls": SECURED["tls"]}, "identity: any caller could use the routers: set identity.apiKeys, identity.jwks, "),
        (SECURED | {"identity": {}}, "sealed with the fleet's secret: set identity.fleetSecret"),
        (
            PLAIN | SECURED | {"router": {"env": [{"name": "TRUNKLINE_FLEET_SECRET", "value": "x"}]}},
            "identity.fleetSecret and a TRUNKLINE_FLEET_SECRET in router.env are both set",
        ),
        (
            IDENTITIES
            | {"router": {"config": {**IDENTITIES["router"]["config"], "jwt_jwks": "https://issuer.example"}}},
            "identity.jwks and router.config.jwt_jwks are both set",
        ),
        (
            IDENTITIES | {"router": {"config": {"jwt_issuer": "https://issuer.example"}}},
            "router.config.jwt_audience: set it, or tokens for other services would count",
        ),
        ({"tls": {"routerSecret": "a", "redisSecret": "c"}}, "tls.routerSecret and tls.workerSecret: set both or none"),
        ({"tls": {"routerSecret": "a", "workerSecret": "b"}}, "redis: set tls.redisSecret, or permit plaintext"),
        (PLAIN | {"tls": {"clientCertificates": True}}, "tls.clientCertificates needs tls.routerSecret"),
        (
            {"tls": SECURED["tls"], "redis": {"enabled": False, "external": {"url": "redis://cache:6379"}}},
            "redis.external.url: use rediss://, or permit plaintext",
        ),
    ],
)
def test_a_chart_that_would_be_readable_or_open_without_being_told_so_does_not_render(
    values: Values, said: str
) -> None:
    found = refusal(values)
    assert said in found
    assert "\n" not in found.strip()


def test_workers_with_a_grant_key_need_no_other_identity() -> None:
    env = [{"name": "TRUNKLINE_GRANT_KEY", "valueFrom": {"secretKeyRef": {"name": "grants", "key": "key"}}}]
    rendered = Rendered(SECURED | {"tls": {}, "allowPlaintext": True, "workerDefaults": {"env": env}})
    assert all(json.loads(config_of(rendered, *one)[0])["allow_anonymous"] is False for one in rendered.ours())


@pytest.mark.parametrize("values", [SECURED, MUTUAL | SEVERAL_POOLS], ids=["secured", "mutual"])
def test_certificates_are_where_the_processes_look_for_them(values: Values) -> None:
    rendered = Rendered(values)
    for workload, container in rendered.ours():
        config = json.loads(config_of(rendered, workload, container)[0])
        assert config["allow_plaintext"] is False
        volumes = {volume["name"]: volume.get("secret", {}) for volume in pod_of(workload)["volumes"]}
        mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in container["volumeMounts"]}
        files = {value for value in config.values() if str(value).startswith("/etc/trunkline-")}
        for file in files:
            secret = mounts[str(Path(file).parent)]
            assert Path(file).name in {item["key"] for item in secret.get("items", ())} or "items" not in secret
        assert mounts["/etc/trunkline-tls"]["secretName"] == container["name"]
        assert not any("subPath" in mount for mount in container["volumeMounts"]), "it would never be renewed"
        if container["name"] == "router":
            assert "worker_tls_ca" in config
            assert ("tls_client_ca" in config) == (values is not SECURED)
            worker_name = config["worker_tls_name"]
            assert mounts["/etc/trunkline-redis-tls"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        else:
            assert config["tls_router_names"] == ["trunkline-router"]
            assert config["tls_client_ca"]
    assert worker_name == "trunkline-worker"
    assert redis_url(values)["value"].startswith("rediss://")
    (test,) = rendered.of("Pod")
    for container in test["spec"]["containers"]:
        assert "--tls-server-name=trunkline-router" in container["args"]
        assert any(argument.startswith("--tls-key=") for argument in container["args"]) == (values is not SECURED)
    ports = [port for service in rendered.of("Service") for port in service["spec"]["ports"] if port["name"] == "grpc"]
    assert {port["appProtocol"] for port in ports} == {"https"}


def test_files_of_identities_are_where_the_routers_look_for_them() -> None:
    rendered = Rendered(IDENTITIES)
    ((workload, container),) = [found for found in rendered.ours() if found[1]["name"] == "router"]
    config = json.loads(config_of(rendered, workload, container)[0])
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert not any("subPath" in mount for mount in container["volumeMounts"]), "a revocation would never arrive"
    found = {}
    for volume in pod_of(workload)["volumes"]:
        for kind, name in (("secret", "secretName"), ("configMap", "name")):
            source = volume.get(kind, {})
            for item in source.get("items", ()):
                place = f"{folders[volume['name']]}/{item['path']}"
                found[place] = (kind, source[name], item["key"], source["defaultMode"])
    assert found == {
        config["api_keys"]: ("secret", "keys", "tenants", 0o440),
        config["fleet_secret_file"]: ("secret", "fleet", "secret", 0o440),
        config["jwt_jwks"]: ("configMap", "issuer", "jwks.json", 0o440),
    }


def test_clients_reach_the_http_port_where_they_reach_the_other_one() -> None:
    for values, scheme in ((EVERYTHING, "http"), (SECURED, "https")):
        ports = {port["name"]: port for port in Rendered(values).one("Service", ROUTER)["spec"]["ports"]}
        assert (ports["http"]["port"], ports["http"]["appProtocol"]) == (8000, scheme)
    (policy,) = [item for item in Rendered(EVERYTHING).of("NetworkPolicy") if item["metadata"]["name"] == ROUTER]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": "grpc"}, {"port": "http"}]
    closed = Rendered(EVERYTHING | {"router": {**EVERYTHING["router"], "http": {"enabled": False}}})
    assert [port["name"] for port in closed.one("Service", ROUTER)["spec"]["ports"]] == ["grpc"]
    (policy,) = [item for item in closed.of("NetworkPolicy") if item["metadata"]["name"] == ROUTER]
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": "grpc"}]


def test_routers_look_up_every_pool(rendered: Rendered) -> None:
    wanted = set()
    for workload in rendered.of("StatefulSet"):
        service = rendered.one("Service", workload["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        (port,) = service["spec"]["ports"]
        assert port["port"] == port_of(pod_of(workload)["containers"][0]), "a headless service does not translate ports"
        wanted.add(f"dns:{service['metadata']['name']}:{port['port']}")
    ((workload, container),) = [found for found in rendered.ours() if found[1]["name"] == "router"]
    named = json.loads(config_of(rendered, workload, container)[0])["workers"]
    assert set(named) == wanted
    assert address_problem(named) is None


def test_every_selector_selects_the_pods_of_one_workload(rendered: Rendered) -> None:
    for workload in rendered.workloads:
        assert selected(workload["spec"]["selector"]["matchLabels"], workload)
        for constraint in pod_of(workload).get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"] == workload["spec"]["selector"]["matchLabels"]
    selectors = [item["spec"]["selector"] for item in rendered.of("Service")]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in rendered.of("PodDisruptionBudget")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in rendered.of("NetworkPolicy")]
    for selector in selectors:
        assert sum(selected(selector, workload) for workload in rendered.workloads) == 1
    for service in rendered.of("Service"):
        (workload,) = [found for found in rendered.workloads if selected(service["spec"]["selector"], found)]
        names = {port["name"] for port in pod_of(workload)["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_what_is_mounted_is_there(rendered: Rendered) -> None:
    for workload in rendered.workloads:
        pod = pod_of(workload)
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert not claims & volumes
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes | claims
        for volume in pod["volumes"]:
            if "configMap" in volume and volume["name"] != "jwks":  # the user's own
                rendered.one("ConfigMap", volume["configMap"]["name"])


def test_a_pod_has_longer_to_end_than_what_it_has_to_finish(rendered: Rendered) -> None:
    for workload, container in rendered.ours():
        config = json.loads(config_of(rendered, workload, container)[0])
        hook = container.get("lifecycle", {}).get("preStop")
        grace_s = pod_of(workload)["terminationGracePeriodSeconds"]
        if container["name"] == "router":
            assert grace_s >= hook["sleep"]["seconds"] + config["stop_timeout_s"] + 5
        else:
            assert grace_s >= config["drain_timeout_s"] + 15
            if "tls_cert" in config:
                assert hook is None, "SIGTERM drains it too, and its certificate is not an operator's"
            else:
                assert hook["exec"]["command"] == ["trunkline", "drain", f"--address=127.0.0.1:{port_of(container)}"]


def test_pods_have_no_right_that_they_do_not_need(rendered: Rendered) -> None:
    for pod in rendered.pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["serviceAccountName"] != "default"
        # TRUNKLINE_PORT is a setting, for example; the variable of a Service called trunkline would be tcp://…
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            # A namespace with a quota refuses pods without these values.
            assert {"requests", "limits"} <= container["resources"].keys()
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(
    ("given", "created", "named"),
    [
        ({}, "demo-trunkline", "demo-trunkline"),
        ({"name": "serving"}, "serving", "serving"),
        ({"create": False, "name": "shared"}, None, "shared"),
        ({"create": False}, None, "default"),
    ],
)
def test_all_pods_are_of_the_account_that_is_created_or_of_the_one_that_is_named(
    given: Values, created: str | None, named: str
) -> None:
    rendered = Rendered({"serviceAccount": given})
    assert {pod["serviceAccountName"] for pod in rendered.pods} == {named}
    assert [item["metadata"]["name"] for item in rendered.of("ServiceAccount")] == ([created] if created else [])
    assert all(item["automountServiceAccountToken"] is False for item in rendered.of("ServiceAccount"))


def test_the_account_has_its_annotations() -> None:
    (account,) = Rendered(EVERYTHING).of("ServiceAccount")
    assert account["metadata"]["annotations"] == EVERYTHING["serviceAccount"]["annotations"]


def test_every_pod_is_placed_and_pulled_as_the_values_say() -> None:
    rendered = Rendered(EVERYTHING)
    assert len(rendered.pods) == 6
    for pod in rendered.pods:
        assert pod["imagePullSecrets"] == EVERYTHING["image"]["pullSecrets"]
        assert (pod["nodeSelector"], pod["tolerations"]) == (PLACED["nodeSelector"], PLACED["tolerations"])
    for workload in rendered.workloads:
        assert pod_of(workload)["affinity"] == PLACED["affinity"]
        assert pod_of(workload)["priorityClassName"] == "serving"
    (test,) = rendered.of("Pod")
    for container in test["spec"]["containers"]:
        assert container["resources"] == EVERYTHING["test"]["resources"]


def spread(values: Values, kind: str, name: str) -> Any:
    return pod_of(Rendered(values).one(kind, f"demo-trunkline-{name}")).get("topologySpreadConstraints")


def test_routers_go_to_different_nodes_where_that_can_be() -> None:
    (constraint,) = spread({}, "Deployment", "router")
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert (constraint["maxSkew"], constraint["whenUnsatisfiable"]) == (1, "ScheduleAnyway")
    assert constraint["matchLabelKeys"] == ["pod-template-hash"], "or those that a rollout replaces are counted too"
    assert spread({}, "StatefulSet", "worker-qwen3-0-6b") is None, "a cluster may pack its GPUs"


def test_constraints_of_the_values_stand_in_place_of_the_charts_own() -> None:
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    theirs = zone | {"labelSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}}
    values = {part: {"topologySpreadConstraints": [zone, theirs]} for part in ("router", "workerDefaults")}
    for kind, name in (("Deployment", "router"), ("StatefulSet", "worker-qwen3-0-6b")):
        labels = {"name": "trunkline", "instance": "demo", "component": name}
        own = {f"app.kubernetes.io/{label}": value for label, value in labels.items()}
        assert spread(values, kind, name) == [zone | {"labelSelector": {"matchLabels": own}}, theirs]


def test_a_pod_that_serves_nobody_holds_up_no_node_that_is_to_be_emptied(rendered: Rendered) -> None:
    budgets = rendered.of("PodDisruptionBudget")
    assert len(budgets) == sum(1 for _ in rendered.ours())
    for budget in budgets:
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_every_command_is_one_of_an_image(rendered: Rendered) -> None:
    commands = {*tomllib.loads(PYPROJECT.read_text())["project"]["scripts"], "hf", "sh"}
    for pod in rendered.pods:
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["command"][0] in commands


def test_a_worker_has_gpus_time_to_load_and_memory_to_share() -> None:
    rendered = Rendered(SEVERAL_POOLS)
    big, small = (pod_of(rendered.one("StatefulSet", f"demo-trunkline-worker-{pool}")) for pool in ("big", "small"))
    assert big["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in small["containers"][0]["resources"]["limits"]
    startup = big["containers"][0]["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    volumes = {volume["name"]: volume for volume in big["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "weights"


@pytest.mark.parametrize(
    ("values", "pool", "path"),
    [
        (SEVERAL_POOLS, "big", "/models/big/v1"),
        (SEVERAL_POOLS, "small", "/models"),
        (EVERYTHING, "claimed", "/models"),
        (EVERYTHING, "gated", "/models/model"),
    ],
)
def test_a_worker_reads_its_model_where_it_is(values: Values, pool: str, path: str) -> None:
    rendered = Rendered(values)
    config = json.loads(rendered.one("ConfigMap", f"demo-trunkline-worker-{pool}")["data"]["worker.json"])
    assert config["model"] == path
    pod = pod_of(rendered.one("StatefulSet", f"demo-trunkline-worker-{pool}"))
    for download in pod.get("initContainers", ()):
        assert f"--local-dir={path}" in download["args"]
        assert [entry["name"] for entry in download["env"]] == ["HOME", "HF_TOKEN"]


def downloaded(values: Values, pool: str) -> str:
    """The revision that a pool's pods download."""
    (download,) = pod_of(Rendered(values).one("StatefulSet", f"demo-trunkline-worker-{pool}"))["initContainers"]
    (flag,) = [argument for argument in download["args"] if argument.startswith("--revision=")]
    return str(flag.removeprefix("--revision="))


@pytest.mark.parametrize("name", ["c" * 40, "main", "refs/pr/3", "v1.2", "feature", "2024-07", "1e5", "face"])
def test_a_model_is_downloaded_at_the_revision_that_is_given(name: str) -> None:
    assert downloaded(revision(name), "a") == name


def example() -> Values:
    """The values that the chart's README shows."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    values: Values = yaml.safe_load(text)
    return values


def test_every_pod_of_a_pool_has_the_same_model_whenever_it_started() -> None:
    for values, pool in ((DEFAULT, "qwen3-0-6b"), (example(), "llama-8b")):
        assert re.fullmatch("[0-9a-f]{40}", downloaded(values, pool)), "a branch moves"


def test_large_numbers_stay_whole_numbers() -> None:
    rendered = Rendered(EVERYTHING)
    config = json.loads(rendered.one("ConfigMap", "demo-trunkline-worker-gated")["data"]["worker.json"])
    assert (config["kv_blocks"], config["max_waiting_tokens"]) == (2_000_000, 1 << 40)
    assert all(isinstance(config[name], int) for name in ("kv_blocks", "max_waiting_tokens"))


def redis_url(values: Values) -> Any:
    container = pod_of(Rendered(values).one("Deployment", "demo-trunkline-router"))["containers"][0]
    found = [entry for entry in container["env"] if entry["name"] == "TRUNKLINE_REDIS_URL"]
    return found[0] if found else None


def test_routers_are_told_of_the_redis_that_there_is() -> None:
    service = Rendered({}).one("Service", "demo-trunkline-redis")
    place = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert redis_url({})["value"] == f"redis://:$(REDIS_PASSWORD)@{place}/0"
    assert redis_url(EXTERNAL_URL)["value"] == "rediss://cache.example.com:6380/2"
    assert redis_url(EXTERNAL_SECRET)["valueFrom"] == {"secretKeyRef": {"name": "cache", "key": "url"}}
    assert redis_url(NO_REDIS) is None
    assert not any("redis" in item["metadata"]["name"] for item in Rendered(EXTERNAL_URL).objects)


def environment_of(rendered: Rendered, name: str) -> dict[str, Any]:
    (container,) = pod_of(rendered.one("Deployment", f"demo-trunkline-{name}"))["containers"]
    return {entry["name"]: entry for entry in container["env"]}


def password_in(rendered: Rendered) -> str:
    return b64decode(rendered.one("Secret", "demo-trunkline-redis")["data"]["password"]).decode()


def test_redis_and_routers_have_the_password_from_one_secret_and_nowhere_else() -> None:
    for values, name, key in (
        (OWN_PASSWORD, "demo-trunkline-redis", "password"),
        (PASSWORD_IN_SECRET, "cache", "word"),
    ):
        rendered = Rendered(values)
        at = {"secretKeyRef": {"name": name, "key": key}}
        assert environment_of(rendered, "redis")["REDISCLI_AUTH"]["valueFrom"] == at
        router = environment_of(rendered, "router")
        assert router["REDIS_PASSWORD"]["valueFrom"] == at
        assert list(router).index("REDIS_PASSWORD") < list(router).index("TRUNKLINE_REDIS_URL"), "or it stays as it is"
        assert not any(PASSWORD in json.dumps(item) for item in rendered.objects if item["kind"] != "Secret")
    assert password_in(Rendered(OWN_PASSWORD)) == PASSWORD
    assert Rendered(PASSWORD_IN_SECRET).of("Secret") == []


def test_a_password_that_nobody_gave_is_drawn() -> None:
    drawn = {password_in(Rendered({})) for _ in range(2)}
    assert len(drawn) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9]{32}", password) for password in drawn)


def test_a_router_of_the_chart_connects_to_nobody_because_redis_says_so(rendered: Rendered) -> None:
    ((workload, container),) = [found for found in rendered.ours() if found[1]["name"] == "router"]
    assert json.loads(config_of(rendered, workload, container)[0])["follow_leases"] is False


def key_prefix(values: Values, **installed: str) -> str:
    rendered = Rendered(values, **installed)
    ((workload, container),) = [found for found in rendered.ours() if found[1]["name"] == "router"]
    prefix: str = json.loads(config_of(rendered, workload, container)[0])["key_prefix"]
    assert sharing_problem("", prefix) is None
    return prefix


def test_releases_do_not_share_what_lies_in_a_redis_that_they_share() -> None:
    installed = [{}, {"release": "other"}, {"namespace": "other"}]
    assert [key_prefix(EXTERNAL_URL, **names) for names in installed] == ["llm/demo:", "llm/other:", "other/demo:"]
    assert key_prefix({"router": {"config": {"key_prefix": "ours:"}}}) == "ours:"


def test_the_redis_of_the_chart_refuses_to_write_rather_than_to_forget_what_tenants_have_used() -> None:
    lines = Rendered({}).one("ConfigMap", "demo-trunkline-redis")["data"]["redis.conf"].splitlines()
    assert {"maxmemory-policy noeviction", "maxmemory 256mb"} <= set(lines)


def test_only_routers_reach_workers_and_redis_where_policies_are_on() -> None:
    rendered = Rendered(EVERYTHING)
    (router,) = [item for item in rendered.of("NetworkPolicy") if item["metadata"]["name"].endswith("-router")]
    others = [item for item in rendered.of("NetworkPolicy") if item is not router]
    assert len(others) == 4
    for policy in others:
        (rule,) = policy["spec"]["ingress"]
        (peer,) = rule["from"]
        assert peer["podSelector"]["matchLabels"] == router["spec"]["podSelector"]["matchLabels"]
    (test,) = rendered.of("Pod")
    clients = router["spec"]["ingress"][0]["from"]
    assert clients[0] == EVERYTHING["networkPolicy"]["clients"][0]
    assert clients[1]["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()


def test_only_routers_reach_redis_although_nobody_turned_policies_on() -> None:
    (policy,) = Rendered({}).of("NetworkPolicy")
    assert selected(
        policy["spec"]["podSelector"]["matchLabels"], Rendered({}).one("Deployment", "demo-trunkline-redis")
    )
    ((peer,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
    assert selected(peer["podSelector"]["matchLabels"], Rendered({}).one("Deployment", "demo-trunkline-router"))
    assert Rendered(OWN_PASSWORD).of("NetworkPolicy") == []


def test_other_settings_make_other_pods() -> None:
    def checksums(values: Values) -> list[str]:
        return [
            workload["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for workload, _ in Rendered(values).ours()
        ]

    router, worker = checksums({})
    assert checksums({"router": {"replicas": 5}}) == [router, worker]
    assert [found == router for found in checksums({"router": {"config": {"max_choices": 3}}})] == [False, False]
    assert checksums({"router": {"tenants": {"a": {"weight": 2}}}})[0] != router
    assert checksums({"workerDefaults": {"config": {"aging_s": 9}}})[1] != worker
    assert checksums(OWN_PASSWORD)[0] != router
    redis = [
        Rendered(values).one("Deployment", "demo-trunkline-redis")["spec"]["template"]["metadata"]["annotations"]
        for values in ({}, {}, OWN_PASSWORD, {"redis": {"maxMemory": "1gb"}})
    ]
    assert [annotations == redis[0] for annotations in redis] == [True, True, False, False]


def test_the_longest_names_fit() -> None:
    rendered = Rendered({"workers": {"p" * 20: HOST_PATH}}, release="r" * 53)
    for item in rendered.objects:
        name = item["metadata"]["name"]
        assert len(name) <= (MOST_STATEFUL_SET_NAME if item["kind"] == "StatefulSet" else MOST_NAME)
